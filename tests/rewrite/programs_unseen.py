"""Programs as text, as in `programs`: constructs of public models that no other program has."""

from __future__ import annotations

from tests.rewrite.programs import Program

PROGRAMS = {
    "a layer behind classes whose loops may have no turn": Program(
        """
class Items(nn.Module):
    widths: Sequence[int]
    final: bool = False

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.widths):
            x = nn.Dense(width)(x)
            if i + 1 < len(self.widths) or self.final:
                x = nn.relu(x)
        return x


class Numbers(nn.Module):
    widths: Sequence[int]
    head: int | None = None

    @nn.compact
    def __call__(self, x):
        for i in range(len(self.widths)):
            x = nn.relu(nn.Dense(self.widths[i])(x))
        if self.head is not None:
            x = nn.Dense(self.head)(x)
        return x


class Turns(nn.Module):
    depth: int
    width: int = 4

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.Dense(self.width)(x)
        return x


class Listed(nn.Module):
    widths: Sequence[int]

    def setup(self):
        self.layers = [nn.Dense(n) for n in self.widths]

    def __call__(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        return x


class Model(nn.Module):
    widths: Sequence[int] = (4, 6)
    depth: int = 1

    @nn.compact
    def __call__(self, x):
        parts = [nn.Dense(2)(Items(self.widths, final=True)(x))]
        parts.append(nn.Dense(3)(Items((*self.widths, 5))(x)))
        parts.append(nn.Dense(4)(Items(self.widths[:-1])(x)))
        parts.append(nn.Dense(5)(Numbers(self.widths)(x)))
        parts.append(nn.Dense(6)(Numbers(self.widths, 7)(x)))
        parts.append(nn.Dense(7)(Turns(self.depth)(x)))
        parts.append(nn.Dense(8)(Listed(self.widths)(x)))
        return jnp.concatenate(parts, axis=-1)
""",
        [{"widths": ()}, {"widths": (3,)}, {"widths": (3, 5, 2), "depth": 0}],
    ),
}
