"""The one exception tree of echo2; docs/reference/errors.md lists it with exit codes.

A message says what was expected, what came, and from whom. The command line prints it as one line and exits with `exit_code`.
"""

from __future__ import annotations

import errno

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # what the system says where the disk is full, or a quota


class EchoError(Exception):
    """Root of all errors that echo2 raises on purpose. `exit_code`: exit status of the command."""

    exit_code = 1


class ConfigError(EchoError):
    """A config file, option or argument is wrong."""

    exit_code = 2


class ProtocolError(EchoError):
    """A message breaks the protocol."""

    exit_code = 3


class VersionMismatch(ProtocolError):
    """Protocol version or model differ between two nodes."""


class MalformedMessage(ProtocolError):
    """A field is missing, out of range or over its limit."""


class TrustError(EchoError):
    """An identity, token or signature does not hold."""

    exit_code = 4


class BadToken(TrustError):
    """The join token is unknown, expired, used up or revoked."""


class BadSignature(TrustError):
    """A signature does not verify."""


class NotAllowed(TrustError):
    """A known identity asks for what its role may not do."""


class IntegrityError(EchoError):
    """Bytes or weights are not what they claim to be."""

    exit_code = 5


class CorruptChunk(IntegrityError):
    """A chunk is not what its publisher signed."""


class DeltaFormatError(IntegrityError):
    """A delta container breaks its format or its limits."""


class FingerprintMismatch(IntegrityError):
    """Weights differ from the version that they claim to be."""


class ResourceError(EchoError):
    """The machine lacks something that is needed."""

    exit_code = 6


class DiskFull(ResourceError):
    """No space is left where something must be kept."""


class PortBusy(ResourceError):
    """The listen address is taken by another process."""


class LimitExceeded(ResourceError):
    """A stated limit of a queue, size or count is reached."""


class EngineError(EchoError):
    """The inference engine failed or refused."""

    exit_code = 7


class StateError(EchoError):
    """Persistent state is missing, locked or belongs to another run."""

    exit_code = 8


class TaskError(EchoError):
    """A task, its data or a reward function is wrong."""

    exit_code = 9


class Unreachable(EchoError):
    """A peer did not answer within its stated time."""

    exit_code = 10


class TrainingError(EchoError):
    """Loss or gradient had no finite value for too many steps in a row."""

    exit_code = 11


class Dismissed(EchoError):
    """The operator sends this worker home. No failure: it ends with exit code 0."""

    exit_code = 0


class RunFinished(Dismissed):
    """The run is over: there is no work left to do. No failure: it ends with exit code 0."""
