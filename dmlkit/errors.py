"""Errors that a user can mend: printed as one line, without a traceback, with exit code 2."""


class UserError(Exception):
    """Something in the user's recipe, files or arguments is wrong.

    The message names where, what came, what was expected and what to do.

    Example:
        >>> raise UserError("data/birds: no images found; expected one folder per class")
        Traceback (most recent call last):
        ...
        dmlkit.errors.UserError: data/birds: no images found; expected one folder per class
    """
