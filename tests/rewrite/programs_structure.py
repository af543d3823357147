"""Programs as text, as in `programs`: arrays of `setup`, ties, and layers made in other places."""

from __future__ import annotations

from tests.rewrite.programs import Of, Program

ARRAYS = {
    "arrays that setup makes": Program(
        """
class Model(nn.Module):
    width: int = 8

    def setup(self):
        self.freqs = jnp.arange(self.width, dtype=jnp.float32)
        self.tables = [jnp.arange(i + 1.0) for i in range(2)]
        self.dense = nn.Dense(self.width)

    def __call__(self, x):
        return self.dense(x) * jnp.cos(self.freqs) + self.tables[1].sum()
""",
        [{"width": 5}, {"width": 12}],
    ),
    "arrays of NumPy as fields": Program(
        """
class Model(nn.Module):
    low: np.ndarray
    high: np.ndarray

    def setup(self):
        self.action_scale = jnp.array((self.high - self.low) / 2)
        self.dense = nn.Dense(self.low.shape[0])

    def __call__(self, x):
        return jnp.tanh(self.dense(x)) * self.action_scale
""",
        [{"low": Of("np.zeros(4)"), "high": Of("2 * np.ones(4)")}],
        fields={"low": Of("-np.ones(3)"), "high": Of("np.ones(3)")},
    ),
    "arrays that setup computes from parameters": Program(
        """
class Model(nn.Module):
    width: int = 6
    bound: bool = True

    def setup(self):
        # Half of it.
        half = self.width // 2
        n = 2 * half
        w = self.param("w", nn.initializers.normal(), (8, n))
        self.unit = w / jnp.linalg.norm(w, axis=0, keepdims=True)
        if self.bound:
            low, self.high = nn.sigmoid(self.param("a", nn.initializers.normal(), (n,))), n
            self.a = low * self.high
        else:
            self.a = 2 * self.param("a", nn.initializers.normal(), (n,))
        self.b = self.param("b", nn.initializers.normal(), (n,))
        self.both = self.a, self.b

    def __call__(self, x):
        a, b = self.both
        return (x @ self.unit) * a + b
""",
        [{"width": 8}, {"bound": False}],
    ),
}
PROGRAMS = {**ARRAYS}
