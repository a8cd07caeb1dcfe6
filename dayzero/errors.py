"""What a user can meet. Every message is one clear sentence that names the file, the field and the remedy.

Exit codes of the command line: 0 passed, 1 the model or checkpoint failed a check (or no layout fits),
2 the call was wrong, 3 this machine lacks something.
"""


class UserError(ValueError):
    """Something a user can cause and mend. ``exit_code`` is what the command line returns."""

    exit_code = 2


class UsageError(UserError):
    """The call was wrong: a path that is no checkpoint, an option that does not exist, a flag that is needed."""

    exit_code = 2


class FieldError(UsageError):
    """A request is wrong in one of its fields. field: its name, as ``messages[2].role`` or ``top_p``."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class CheckpointError(UserError):
    """The checkpoint failed a check: damaged, incomplete, or contradicting itself."""

    exit_code = 1


class ConfigError(CheckpointError):
    """A config key is missing, has the wrong type, or a value that the family does not have."""


class ModelError(UserError):
    """No recipe covers this model, or no layout fits it."""

    exit_code = 1


class MachineError(UserError):
    """This machine lacks something: a package, a network, an accelerator. The message says what to do."""

    exit_code = 3


class EngineDead(UserError):
    """There is no engine that could answer: it is loading, draining, being restarted, or it has ended for good."""

    exit_code = 3


class Overloaded(UserError):
    """The engine has as many requests waiting as it may have; try again later."""

    exit_code = 3
