"""The mathematics of the free energy read as functions a reader can run: prior rows, their values, any batch.

    F(beta) = (1 / beta) log sum_i p_i exp(beta v_i)        q_i proportional to p_i exp(beta v_i)        (Eq. 4, 5)

p is a distribution over the tokens along `dim`, v are the tokens' values; p and v broadcast against each other, and
beta, lam against the result, which has no `dim`. beta is an inverse temperature in nats per unit of v; infinity is
the limit in which only the largest values are read. A token with p_i = 0 is outside the support: its value is not
read, whatever it is, and neither gets a gradient. A row without support reads 0. Sums run in float64, and results
have the inputs' dtype. Statements, their tests and the corrections to the paper are in docs/equations.md.
"""

from fem.theory.definitions import effective_weights, free_energy, index_accuracy, kl_gap, posterior, posterior_mean
from fem.theory.temperature import hidden_temperature, temperature_for_budget

__all__ = [
    "effective_weights",
    "free_energy",
    "hidden_temperature",
    "index_accuracy",
    "kl_gap",
    "posterior",
    "posterior_mean",
    "temperature_for_budget",
]
