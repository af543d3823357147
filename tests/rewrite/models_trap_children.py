"""Modules in modules where NNX does not do what Linen does."""

from __future__ import annotations

from flax import linen as nn


class Part(nn.Module):
    n: int = 4
    strides: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.n)(x[:, :: self.strides])
        r = x
        if r.shape != y.shape:
            r = nn.Dense(self.n, name="proj")(x[:, :: self.strides])
        return r + y


class ShapeCondition(nn.Module):
    @nn.compact
    def __call__(self, x):
        for n, s in ((4, 1), (8, 2), (8, 1), (4, 2)):
            x = Part(n, s)(x)
        return nn.Dense(4)(x)


class Inner(nn.Module):
    n: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.n)(x)


class ModuleField(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.inner(x) + nn.Dense(4)(x)


class MakesModuleField(nn.Module):
    @nn.compact
    def __call__(self, x):
        return ModuleField(inner=Inner(4))(x)


class SharedField(nn.Module):
    def setup(self):
        self.a = Inner(4)
        self.one = ModuleField(self.a)
        self.two = ModuleField(self.a)

    def __call__(self, x):
        return self.two(self.one(x))


class Base(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return self.body(nn.Dense(self.width)(x))

    def body(self, x):
        return x


class Derived(Base):
    scale: float = 2.0

    @nn.compact
    def body(self, x):
        return nn.relu(x) * self.scale


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(
            4, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", None))
        )(x), None


class ScanMeta(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            Annotated,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layer()(x, None)[0]


class Outputs(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(4)(x)
        return x, x * 2


class ScanOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            Outputs,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, ys = layer(name="stack")(x, None)
        return x + ys.sum(0)


class RematBlock(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(self.n)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class RematStatic(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        block = nn.remat(RematBlock, static_argnums=(2,))
        for i in range(2):
            x = block(4, name=f"b_{i}")(x, train)
        return x


class VmapEnsemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        e = nn.vmap(
            Inner,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=0,
            axis_size=3,
        )
        return e(4)(x).mean(0)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Inner)(4)(x)


class OtherMethod(nn.Module):
    def setup(self):
        self.enc = nn.Dense(3)
        self.dec = nn.Dense(4)

    def encode(self, x):
        return self.enc(x)

    def decode(self, z):
        return self.dec(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


class CallsMethodOfChild(nn.Module):
    def setup(self):
        self.ae = OtherMethod()

    def __call__(self, x):
        return self.ae.decode(nn.relu(self.ae.encode(x)))


class Logical(nn.Module):
    @nn.compact
    def __call__(self, x):
        k = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(4, kernel_init=k)(x)
        x = nn.with_logical_constraint(x, ("batch", "len", "embed"))
        return x * self.param("s", nn.with_partitioning(nn.initializers.ones, ("embed",)), (4,))


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = ShapeCondition()(x)
        x = MakesModuleField()(x)
        x = SharedField()(x)
        x = Derived()(x)
        x = ScanMeta()(x)
        x = ScanOutputs()(x)
        x = RematStatic()(x, train)
        x = VmapEnsemble()(x)
        x = Jitted()(x)
        x = CallsMethodOfChild()(x)
        return Logical()(x)
