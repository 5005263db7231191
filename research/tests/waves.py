"""Made-up series, and `fem forecast` as a user calls it."""

import numpy as np
import pandas as pd
from command_line import fem

from fem_research.forecast.series import ETT_CHANNELS


def waves(rows: int, channels: int = 2) -> pd.DataFrame:
    time = np.arange(rows)[:, None]
    values = np.sin(time / (3 + np.arange(channels))) + 0.1 * np.random.default_rng(0).standard_normal((rows, channels))
    table = pd.DataFrame(values, columns=[f"c{channel}" for channel in range(channels)])
    table.insert(0, "date", pd.date_range("2020-01-01", periods=rows, freq="h"))
    return table


def ett(rows: int) -> pd.DataFrame:
    return waves(rows, 7).set_axis(["date", *ETT_CHANNELS], axis=1)


def command(monkeypatch, *arguments):
    return fem(monkeypatch, "forecast", *map(str, arguments))
