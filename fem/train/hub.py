"""Whether the Hugging Face hub can be reached, tested within seconds: its own client retries for minutes."""

from __future__ import annotations

import threading

from fem.runs.run import first_line

SECONDS = 6.0


def way_to_the_hub() -> None:
    """Raises OSError where there is no way to the hub, or where HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    found: list[Exception | None] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
            found.append(None)
        except Exception as error:
            found.append(error)

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set, so the hub is not asked")
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    if not found or found[0] is not None:
        reason = first_line(found[0]) if found else "no answer"
        raise OSError(f"no way to {constants.ENDPOINT} within {SECONDS:g} seconds ({reason})")
