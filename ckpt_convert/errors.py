"""The one error of this package."""


class ConvertError(ValueError):
    """A checkpoint or its config cannot be converted. The message names the file or key, and a way out."""
