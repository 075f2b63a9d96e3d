"""A device for torch, ``vpu``. Importing the package starts it."""

__all__ = ["autoload"]


def autoload() -> None:
    """What torch calls when it is imported."""
    import vpu_plugin.device  # noqa: F401 - registers the device
