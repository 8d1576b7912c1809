"""What can be wrong with a record, one type for each thing that a reader checks."""

from typing import ClassVar

from kvtier.errors import KVTierError


class RecordError(KVTierError):
    """A record cannot be served. `what` names the part of it that is wrong, one word for metrics and logs."""

    what: ClassVar[str] = "record"


class RecordMagicError(RecordError):
    """The bytes do not begin as a record does: nothing was written here, or something else was."""

    what = "magic"


class RecordVersionError(RecordError):
    """The record is of a format version that this code does not read."""

    what = "version"


class RecordHeadError(RecordError):
    """The head is damaged: its own checksum or its metadata is wrong, so that nothing it says counts."""

    what = "head"


class RecordKeyError(RecordError):
    """A sound record of another key."""

    what = "key"


class RecordNamespaceError(RecordError):
    """A sound record of another namespace."""

    what = "namespace"


class RecordGenerationError(RecordError):
    """A sound record of another generation: what it holds was reset, or is not valid yet."""

    what = "generation"


class RecordPartError(RecordError):
    """A sound record of another group or rank."""

    what = "part"


class RecordLengthError(RecordError):
    """There are more or fewer bytes than the record or its reader says."""

    what = "length"


class RecordChecksumError(RecordError):
    """The head is sound and expected, and the payload is not what was written."""

    what = "checksum"


class HeadTooLargeError(RecordError):
    """The head would not fit in HEAD_BYTES_MAX: key, namespace or codec parameters are too long."""

    what = "head_size"


class CodecError(RecordError):
    """A codec is not known, not available here, refuses its parameters or input, or cannot decode."""

    what = "codec"
