from thinwire.proto import thinwire_pb2 as _thinwire_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Standing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STANDING_ELSEWHERE: _ClassVar[Standing]
    STANDING_FETCHED: _ClassVar[Standing]
    STANDING_STEPPED: _ClassVar[Standing]
STANDING_ELSEWHERE: Standing
STANDING_FETCHED: Standing
STANDING_STEPPED: Standing

class ToPeer(_message.Message):
    __slots__ = ("greeting", "query", "part", "chunk")
    GREETING_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    greeting: Greeting
    query: ModelQuery
    part: Part
    chunk: _thinwire_pb2.Chunk
    def __init__(self, greeting: _Optional[_Union[Greeting, _Mapping]] = ..., query: _Optional[_Union[ModelQuery, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., chunk: _Optional[_Union[_thinwire_pb2.Chunk, _Mapping]] = ...) -> None: ...

class FromPeer(_message.Message):
    __slots__ = ("refusal", "holding", "chunk")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    refusal: _thinwire_pb2.Refusal
    holding: Holding
    chunk: _thinwire_pb2.Chunk
    def __init__(self, refusal: _Optional[_Union[_thinwire_pb2.Refusal, _Mapping]] = ..., holding: _Optional[_Union[Holding, _Mapping]] = ..., chunk: _Optional[_Union[_thinwire_pb2.Chunk, _Mapping]] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("protocol_version", "run_id", "worker", "proof")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    worker: int
    proof: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., worker: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("view", "generation", "round", "number", "payload_bytes", "payload")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    view: int
    generation: int
    round: int
    number: int
    payload_bytes: int
    payload: bytes
    def __init__(self, view: _Optional[int] = ..., generation: _Optional[int] = ..., round: _Optional[int] = ..., number: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ModelQuery(_message.Message):
    __slots__ = ("generation", "version", "digest")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    generation: int
    version: int
    digest: bytes
    def __init__(self, generation: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("standing", "version", "generation", "same", "payload_bytes", "payload")
    STANDING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    standing: Standing
    version: int
    generation: int
    same: bool
    payload_bytes: int
    payload: bytes
    def __init__(self, standing: _Optional[_Union[Standing, str]] = ..., version: _Optional[int] = ..., generation: _Optional[int] = ..., same: bool = ..., payload_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...
