"""Whether the Hugging Face hub can be reached, asked once: the client itself asks again and again, for minutes."""

from __future__ import annotations

from fem.runs.run import first_line

SECONDS = 6.0  # to connect, and to answer


def way_to_the_hub() -> None:
    """Raises OSError if the hub cannot be reached, or if HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set, so the hub is not asked")
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:
        raise OSError(f"no way to {constants.ENDPOINT} within {SECONDS:g} seconds ({first_line(error)})") from error
