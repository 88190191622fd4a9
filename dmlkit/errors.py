"""The error for mistakes that a user can fix: printed as one line, without a traceback, with exit code 2."""


class UserError(Exception):
    """Error in the user's recipe, files or arguments.

    The message says what is wrong (file, line, key, the value found), what was expected and what to do.

    Example:
        >>> raise UserError("data/birds: no images found; expected one folder per class")
        Traceback (most recent call last):
        ...
        dmlkit.errors.UserError: data/birds: no images found; expected one folder per class
    """
