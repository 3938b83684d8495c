from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_SUPERVISOR: _ClassVar[Role]
    ROLE_SHARD: _ClassVar[Role]
    ROLE_SCRIPT: _ClassVar[Role]
    ROLE_EVALUATOR: _ClassVar[Role]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_PROTOCOL_VERSION: _ClassVar[Reason]
    REASON_RUN: _ClassVar[Reason]
    REASON_FINGERPRINT: _ClassVar[Reason]
    REASON_MODEL: _ClassVar[Reason]
    REASON_ID_TAKEN: _ClassVar[Reason]
    REASON_ID_RANGE: _ClassVar[Reason]
    REASON_MALFORMED: _ClassVar[Reason]
    REASON_NON_FINITE: _ClassVar[Reason]
    REASON_STALE_EPOCH: _ClassVar[Reason]
    REASON_NOT_MEMBER: _ClassVar[Reason]
    REASON_TOPOLOGY: _ClassVar[Reason]
    REASON_STARTING: _ClassVar[Reason]
    REASON_FULL: _ClassVar[Reason]
    REASON_STALE_GENERATION: _ClassVar[Reason]
    REASON_IDENTITY: _ClassVar[Reason]
    REASON_TOKEN: _ClassVar[Reason]
    REASON_LIMIT: _ClassVar[Reason]
    REASON_OUTLIER: _ClassVar[Reason]
    REASON_NO_MODEL: _ClassVar[Reason]
    REASON_OFFER: _ClassVar[Reason]
    REASON_OPTIMIZER: _ClassVar[Reason]
    REASON_OTHER_PROGRAM: _ClassVar[Reason]
    REASON_PHASE: _ClassVar[Reason]
    REASON_ENDS: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_QUARANTINED: _ClassVar[Reason]

class IndexCoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_CODING_DENSE: _ClassVar[IndexCoding]
    INDEX_CODING_BITMAP: _ClassVar[IndexCoding]
    INDEX_CODING_RICE: _ClassVar[IndexCoding]
    INDEX_CODING_DEFLATED_GAPS: _ClassVar[IndexCoding]
    INDEX_CODING_UINT32: _ClassVar[IndexCoding]
    INDEX_CODING_LOW_RANK: _ClassVar[IndexCoding]
    INDEX_CODING_RANGES: _ClassVar[IndexCoding]

class ValueDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALUE_DTYPE_FLOAT32: _ClassVar[ValueDtype]
    VALUE_DTYPE_BFLOAT16: _ClassVar[ValueDtype]
    VALUE_DTYPE_FLOAT16: _ClassVar[ValueDtype]
    VALUE_DTYPE_INT8: _ClassVar[ValueDtype]
    VALUE_DTYPE_INT4: _ClassVar[ValueDtype]
    VALUE_DTYPE_INT2: _ClassVar[ValueDtype]
    VALUE_DTYPE_MEANS2: _ClassVar[ValueDtype]
    VALUE_DTYPE_SIGN: _ClassVar[ValueDtype]

class ValueCoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALUE_CODING_PLAIN: _ClassVar[ValueCoding]
    VALUE_CODING_EXPONENTS: _ClassVar[ValueCoding]
    VALUE_CODING_CODES: _ClassVar[ValueCoding]
    VALUE_CODING_DEFLATED_CODES: _ClassVar[ValueCoding]

class UpdateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_KIND_GRADIENT: _ClassVar[UpdateKind]
    UPDATE_KIND_DELTA: _ClassVar[UpdateKind]
    UPDATE_KIND_VALUES: _ClassVar[UpdateKind]

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_NONE: _ClassVar[Operation]
    OPERATION_FULL: _ClassVar[Operation]
    OPERATION_SET: _ClassVar[Operation]
    OPERATION_ADD: _ClassVar[Operation]
    OPERATION_SET_REST: _ClassVar[Operation]
    OPERATION_RELAY: _ClassVar[Operation]
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_SUPERVISOR: Role
ROLE_SHARD: Role
ROLE_SCRIPT: Role
ROLE_EVALUATOR: Role
REASON_UNSPECIFIED: Reason
REASON_PROTOCOL_VERSION: Reason
REASON_RUN: Reason
REASON_FINGERPRINT: Reason
REASON_MODEL: Reason
REASON_ID_TAKEN: Reason
REASON_ID_RANGE: Reason
REASON_MALFORMED: Reason
REASON_NON_FINITE: Reason
REASON_STALE_EPOCH: Reason
REASON_NOT_MEMBER: Reason
REASON_TOPOLOGY: Reason
REASON_STARTING: Reason
REASON_FULL: Reason
REASON_STALE_GENERATION: Reason
REASON_IDENTITY: Reason
REASON_TOKEN: Reason
REASON_LIMIT: Reason
REASON_OUTLIER: Reason
REASON_NO_MODEL: Reason
REASON_OFFER: Reason
REASON_OPTIMIZER: Reason
REASON_OTHER_PROGRAM: Reason
REASON_PHASE: Reason
REASON_ENDS: Reason
REASON_INTERNAL: Reason
REASON_QUARANTINED: Reason
INDEX_CODING_DENSE: IndexCoding
INDEX_CODING_BITMAP: IndexCoding
INDEX_CODING_RICE: IndexCoding
INDEX_CODING_DEFLATED_GAPS: IndexCoding
INDEX_CODING_UINT32: IndexCoding
INDEX_CODING_LOW_RANK: IndexCoding
INDEX_CODING_RANGES: IndexCoding
VALUE_DTYPE_FLOAT32: ValueDtype
VALUE_DTYPE_BFLOAT16: ValueDtype
VALUE_DTYPE_FLOAT16: ValueDtype
VALUE_DTYPE_INT8: ValueDtype
VALUE_DTYPE_INT4: ValueDtype
VALUE_DTYPE_INT2: ValueDtype
VALUE_DTYPE_MEANS2: ValueDtype
VALUE_DTYPE_SIGN: ValueDtype
VALUE_CODING_PLAIN: ValueCoding
VALUE_CODING_EXPONENTS: ValueCoding
VALUE_CODING_CODES: ValueCoding
VALUE_CODING_DEFLATED_CODES: ValueCoding
UPDATE_KIND_GRADIENT: UpdateKind
UPDATE_KIND_DELTA: UpdateKind
UPDATE_KIND_VALUES: UpdateKind
OPERATION_NONE: Operation
OPERATION_FULL: Operation
OPERATION_SET: Operation
OPERATION_ADD: Operation
OPERATION_SET_REST: Operation
OPERATION_RELAY: Operation

class ToServer(_message.Message):
    __slots__ = ("hello", "pull", "push", "chunk", "heartbeat", "leave", "report", "halt", "query", "datagrams", "offer", "barrier", "finished", "slots", "fit_begun", "epoch_ended", "evaluated", "evaluator", "fit_ended", "stop_fit", "switch", "epoch_meeting")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DATAGRAMS_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FIT_BEGUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ENDED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    EVALUATOR_FIELD_NUMBER: _ClassVar[int]
    FIT_ENDED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIT_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MEETING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    pull: Pull
    push: Push
    chunk: Chunk
    heartbeat: Heartbeat
    leave: Leave
    report: Report
    halt: Halt
    query: Query
    datagrams: Datagrams
    offer: Offer
    barrier: Barrier
    finished: Finished
    slots: SlotsRequest
    fit_begun: FitBegun
    epoch_ended: EpochEnded
    evaluated: Evaluated
    evaluator: Evaluator
    fit_ended: FitEnded
    stop_fit: StopFit
    switch: Switch
    epoch_meeting: EpochMeeting
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., datagrams: _Optional[_Union[Datagrams, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., barrier: _Optional[_Union[Barrier, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., slots: _Optional[_Union[SlotsRequest, _Mapping]] = ..., fit_begun: _Optional[_Union[FitBegun, _Mapping]] = ..., epoch_ended: _Optional[_Union[EpochEnded, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., evaluator: _Optional[_Union[Evaluator, _Mapping]] = ..., fit_ended: _Optional[_Union[FitEnded, _Mapping]] = ..., stop_fit: _Optional[_Union[StopFit, _Mapping]] = ..., switch: _Optional[_Union[Switch, _Mapping]] = ..., epoch_meeting: _Optional[_Union[EpochMeeting, _Mapping]] = ...) -> None: ...

class ToClient(_message.Message):
    __slots__ = ("welcome", "refusal", "reply", "chunk", "waiting", "membership", "halt", "report", "answer", "barrier", "slots", "finished", "fit_begun", "epoch_ended", "evaluated", "fit_ended", "stop_fit", "chief", "switch", "epoch_meeting")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FIT_BEGUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ENDED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    FIT_ENDED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIT_FIELD_NUMBER: _ClassVar[int]
    CHIEF_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MEETING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    reply: Reply
    chunk: Chunk
    waiting: Waiting
    membership: Membership
    halt: Halt
    report: Report
    answer: Answer
    barrier: Barrier
    slots: Slots
    finished: Finished
    fit_begun: FitBegun
    epoch_ended: EpochEnded
    evaluated: Evaluated
    fit_ended: FitEnded
    stop_fit: StopFit
    chief: Chief
    switch: Switch
    epoch_meeting: EpochMeeting
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., barrier: _Optional[_Union[Barrier, _Mapping]] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., fit_begun: _Optional[_Union[FitBegun, _Mapping]] = ..., epoch_ended: _Optional[_Union[EpochEnded, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., fit_ended: _Optional[_Union[FitEnded, _Mapping]] = ..., stop_fit: _Optional[_Union[StopFit, _Mapping]] = ..., chief: _Optional[_Union[Chief, _Mapping]] = ..., switch: _Optional[_Union[Switch, _Mapping]] = ..., epoch_meeting: _Optional[_Union[EpochMeeting, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("path", "shape", "dtype")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, path: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class EmulatedLink(_message.Message):
    __slots__ = ("mbps", "delay_ms", "loss", "seed")
    MBPS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    mbps: float
    delay_ms: float
    loss: float
    seed: int
    def __init__(self, mbps: _Optional[float] = ..., delay_ms: _Optional[float] = ..., loss: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "role", "id", "run_id", "fingerprint", "model", "incarnation", "link", "shard", "num_shards", "peer_address", "proof", "epoch", "phase", "generation", "bulk", "halts")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    HALTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: Role
    id: int
    run_id: str
    fingerprint: _containers.RepeatedCompositeFieldContainer[Setting]
    model: _containers.RepeatedCompositeFieldContainer[Tensor]
    incarnation: int
    link: EmulatedLink
    shard: int
    num_shards: int
    peer_address: str
    proof: bytes
    epoch: int
    phase: int
    generation: int
    bulk: bool
    halts: bool
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., id: _Optional[int] = ..., run_id: _Optional[str] = ..., fingerprint: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., model: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., incarnation: _Optional[int] = ..., link: _Optional[_Union[EmulatedLink, _Mapping]] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., peer_address: _Optional[str] = ..., proof: _Optional[bytes] = ..., epoch: _Optional[int] = ..., phase: _Optional[int] = ..., generation: _Optional[int] = ..., bulk: bool = ..., halts: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "incarnation", "last_applied_step", "knows_worker", "epoch", "generation", "version", "lease_seconds", "document", "datagrams", "addresses", "bulk")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_STEP_FIELD_NUMBER: _ClassVar[int]
    KNOWS_WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    DATAGRAMS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    last_applied_step: int
    knows_worker: bool
    epoch: int
    generation: int
    version: int
    lease_seconds: float
    document: str
    datagrams: DatagramSession
    addresses: _containers.RepeatedScalarFieldContainer[str]
    bulk: BulkSession
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., last_applied_step: _Optional[int] = ..., knows_worker: bool = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., version: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., document: _Optional[str] = ..., datagrams: _Optional[_Union[DatagramSession, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ..., bulk: _Optional[_Union[BulkSession, _Mapping]] = ...) -> None: ...

class BulkSession(_message.Message):
    __slots__ = ("port", "number", "key")
    PORT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    port: int
    number: bytes
    key: bytes
    def __init__(self, port: _Optional[int] = ..., number: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...

class Switch(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DatagramSession(_message.Message):
    __slots__ = ("session", "key", "ports")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    session: int
    key: bytes
    ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., key: _Optional[bytes] = ..., ports: _Optional[_Iterable[int]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message", "step", "epoch", "retry_after_seconds", "phase")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    message: str
    step: int
    epoch: int
    retry_after_seconds: float
    phase: int
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., retry_after_seconds: _Optional[float] = ..., phase: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("slot", "count", "coding", "coding_parameter", "index_bytes", "value_dtype", "scale", "value_coding", "value_bytes", "chunk", "chunk_first", "slots")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    CODING_PARAMETER_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    VALUE_CODING_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIRST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    count: int
    coding: IndexCoding
    coding_parameter: int
    index_bytes: int
    value_dtype: ValueDtype
    scale: float
    value_coding: ValueCoding
    value_bytes: int
    chunk: int
    chunk_first: int
    slots: int
    def __init__(self, slot: _Optional[int] = ..., count: _Optional[int] = ..., coding: _Optional[_Union[IndexCoding, str]] = ..., coding_parameter: _Optional[int] = ..., index_bytes: _Optional[int] = ..., value_dtype: _Optional[_Union[ValueDtype, str]] = ..., scale: _Optional[float] = ..., value_coding: _Optional[_Union[ValueCoding, str]] = ..., value_bytes: _Optional[int] = ..., chunk: _Optional[int] = ..., chunk_first: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("base_version", "has_base", "generation", "observe")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_BASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    has_base: bool
    generation: int
    observe: bool
    def __init__(self, base_version: _Optional[int] = ..., has_base: bool = ..., generation: _Optional[int] = ..., observe: bool = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("incarnation", "step", "base_version", "generation", "epoch", "kind", "samples", "local_steps", "learning_rate", "loss", "aux_count", "base_checksum", "manifest", "more", "loss_scale", "overflow", "sets_rate", "lag", "blocks", "payload_bytes", "optimizer", "repeats_batch", "changes", "change_bytes", "batch_parts", "settings", "without_gradient", "payload")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    AUX_COUNT_FIELD_NUMBER: _ClassVar[int]
    BASE_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    SETS_RATE_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    REPEATS_BATCH_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    CHANGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BATCH_PARTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    base_version: int
    generation: int
    epoch: int
    kind: UpdateKind
    samples: int
    local_steps: int
    learning_rate: float
    loss: float
    aux_count: int
    base_checksum: int
    manifest: Manifest
    more: bool
    loss_scale: float
    overflow: bool
    sets_rate: bool
    lag: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    payload_bytes: int
    optimizer: int
    repeats_batch: bool
    changes: _containers.RepeatedCompositeFieldContainer[Block]
    change_bytes: int
    batch_parts: int
    settings: _containers.RepeatedScalarFieldContainer[float]
    without_gradient: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ..., base_version: _Optional[int] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., kind: _Optional[_Union[UpdateKind, str]] = ..., samples: _Optional[int] = ..., local_steps: _Optional[int] = ..., learning_rate: _Optional[float] = ..., loss: _Optional[float] = ..., aux_count: _Optional[int] = ..., base_checksum: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., more: bool = ..., loss_scale: _Optional[float] = ..., overflow: bool = ..., sets_rate: bool = ..., lag: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., payload_bytes: _Optional[int] = ..., optimizer: _Optional[int] = ..., repeats_batch: bool = ..., changes: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., change_bytes: _Optional[int] = ..., batch_parts: _Optional[int] = ..., settings: _Optional[_Iterable[float]] = ..., without_gradient: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("channels", "k", "num_blocks", "num_skipped", "num_reliable", "num_dropped")
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_RELIABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    channels: _containers.RepeatedCompositeFieldContainer[Announced]
    k: float
    num_blocks: int
    num_skipped: int
    num_reliable: int
    num_dropped: int
    def __init__(self, channels: _Optional[_Iterable[_Union[Announced, _Mapping]]] = ..., k: _Optional[float] = ..., num_blocks: _Optional[int] = ..., num_skipped: _Optional[int] = ..., num_reliable: _Optional[int] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("channel", "first", "count")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    channel: int
    first: int
    count: int
    def __init__(self, channel: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Datagrams(_message.Message):
    __slots__ = ("size", "data")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    size: int
    data: bytes
    def __init__(self, size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class RelayedRound(_message.Message):
    __slots__ = ("num_blocks", "rate", "own")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    rate: float
    own: int
    def __init__(self, num_blocks: _Optional[_Iterable[int]] = ..., rate: _Optional[float] = ..., own: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("version", "generation", "epoch", "operation", "learning_rate", "samples", "stop", "step", "stop_reason", "held_seconds", "staleness", "aux_count", "members", "loss_scale", "outcome", "rounds", "schedule_counts", "blocks", "payload_bytes", "payload")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    AUX_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    version: int
    generation: int
    epoch: int
    operation: Operation
    learning_rate: float
    samples: int
    stop: bool
    step: int
    stop_reason: str
    held_seconds: float
    staleness: int
    aux_count: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    loss_scale: float
    outcome: DatagramOutcome
    rounds: _containers.RepeatedCompositeFieldContainer[RelayedRound]
    schedule_counts: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    payload_bytes: int
    payload: bytes
    def __init__(self, version: _Optional[int] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., learning_rate: _Optional[float] = ..., samples: _Optional[int] = ..., stop: bool = ..., step: _Optional[int] = ..., stop_reason: _Optional[str] = ..., held_seconds: _Optional[float] = ..., staleness: _Optional[int] = ..., aux_count: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., loss_scale: _Optional[float] = ..., outcome: _Optional[_Union[DatagramOutcome, _Mapping]] = ..., rounds: _Optional[_Iterable[_Union[RelayedRound, _Mapping]]] = ..., schedule_counts: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., payload_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class DatagramOutcome(_message.Message):
    __slots__ = ("announced", "arrived", "late", "came_late", "fresh", "filled", "bitmap")
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    CAME_LATE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    announced: int
    arrived: int
    late: int
    came_late: int
    fresh: float
    filled: float
    bitmap: bytes
    def __init__(self, announced: _Optional[int] = ..., arrived: _Optional[int] = ..., late: _Optional[int] = ..., came_late: _Optional[int] = ..., fresh: _Optional[float] = ..., filled: _Optional[float] = ..., bitmap: _Optional[bytes] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("worker", "incarnation", "address")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    address: str
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("incarnation", "step", "local_steps", "step_seconds", "age_seconds", "query_seconds")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUERY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    local_steps: int
    step_seconds: float
    age_seconds: float
    query_seconds: float
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ..., local_steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., age_seconds: _Optional[float] = ..., query_seconds: _Optional[float] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("step", "local_steps", "ready")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    step: int
    local_steps: int
    ready: bool
    def __init__(self, step: _Optional[int] = ..., local_steps: _Optional[int] = ..., ready: bool = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("unreachable",)
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    unreachable: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, unreachable: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("epoch", "groups", "started", "formed", "formed_epoch", "draws", "joiners", "over")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    FORMED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    started: bool
    formed: _containers.RepeatedCompositeFieldContainer[Group]
    formed_epoch: int
    draws: _containers.RepeatedCompositeFieldContainer[Draw]
    joiners: _containers.RepeatedCompositeFieldContainer[Joiners]
    over: _containers.RepeatedCompositeFieldContainer[OverStep]
    def __init__(self, epoch: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., started: bool = ..., formed: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., formed_epoch: _Optional[int] = ..., draws: _Optional[_Iterable[_Union[Draw, _Mapping]]] = ..., joiners: _Optional[_Iterable[_Union[Joiners, _Mapping]]] = ..., over: _Optional[_Iterable[_Union[OverStep, _Mapping]]] = ...) -> None: ...

class OverStep(_message.Message):
    __slots__ = ("worker", "step")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    worker: int
    step: int
    def __init__(self, worker: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Joiners(_message.Message):
    __slots__ = ("workers", "has_entered", "members", "after")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    HAS_ENTERED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    has_entered: bool
    members: _containers.RepeatedScalarFieldContainer[int]
    after: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, workers: _Optional[_Iterable[int]] = ..., has_entered: bool = ..., members: _Optional[_Iterable[int]] = ..., after: _Optional[_Iterable[int]] = ...) -> None: ...

class Draw(_message.Message):
    __slots__ = ("number", "of_round", "workers", "steps", "after")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OF_ROUND_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    number: int
    of_round: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    after: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., of_round: _Optional[int] = ..., workers: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., after: _Optional[_Iterable[int]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("workers", "steps", "incarnations")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, workers: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., incarnations: _Optional[_Iterable[int]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("document", "rounds", "worker")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    document: str
    rounds: str
    worker: int
    def __init__(self, document: _Optional[str] = ..., rounds: _Optional[str] = ..., worker: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("document", "payload_bytes")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    document: str
    payload_bytes: int
    def __init__(self, document: _Optional[str] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Barrier(_message.Message):
    __slots__ = ("name", "cause", "passed", "changes", "offers", "changed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    name: str
    cause: str
    passed: _containers.RepeatedScalarFieldContainer[str]
    changes: bool
    offers: bool
    changed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., cause: _Optional[str] = ..., passed: _Optional[_Iterable[str]] = ..., changes: bool = ..., offers: bool = ..., changed: _Optional[_Iterable[str]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("failed", "message")
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    failed: bool
    message: str
    def __init__(self, failed: bool = ..., message: _Optional[str] = ...) -> None: ...

class SlotsRequest(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: bool
    def __init__(self, weights: bool = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("document", "payload_bytes")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    document: str
    payload_bytes: int
    def __init__(self, document: _Optional[str] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class FitBegun(_message.Message):
    __slots__ = ("fit", "validates", "variables", "num_weights", "shards", "phase", "by_script")
    FIT_FIELD_NUMBER: _ClassVar[int]
    VALIDATES_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BY_SCRIPT_FIELD_NUMBER: _ClassVar[int]
    fit: int
    validates: bool
    variables: _containers.RepeatedScalarFieldContainer[int]
    num_weights: int
    shards: _containers.RepeatedCompositeFieldContainer[Layout]
    phase: int
    by_script: bool
    def __init__(self, fit: _Optional[int] = ..., validates: bool = ..., variables: _Optional[_Iterable[int]] = ..., num_weights: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Layout, _Mapping]]] = ..., phase: _Optional[int] = ..., by_script: bool = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("variables", "starts", "stops")
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    stops: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, variables: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., stops: _Optional[_Iterable[int]] = ...) -> None: ...

class EpochEnded(_message.Message):
    __slots__ = ("fit", "epoch", "by_script")
    FIT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BY_SCRIPT_FIELD_NUMBER: _ClassVar[int]
    fit: int
    epoch: int
    by_script: bool
    def __init__(self, fit: _Optional[int] = ..., epoch: _Optional[int] = ..., by_script: bool = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "values", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedScalarFieldContainer[float]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("fit", "epoch", "answers", "final", "versions", "metrics", "nobody", "by_script")
    FIT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    NOBODY_FIELD_NUMBER: _ClassVar[int]
    BY_SCRIPT_FIELD_NUMBER: _ClassVar[int]
    fit: int
    epoch: int
    answers: bool
    final: bool
    versions: _containers.RepeatedScalarFieldContainer[int]
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    nobody: str
    by_script: bool
    def __init__(self, fit: _Optional[int] = ..., epoch: _Optional[int] = ..., answers: bool = ..., final: bool = ..., versions: _Optional[_Iterable[int]] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., nobody: _Optional[str] = ..., by_script: bool = ...) -> None: ...

class Evaluator(_message.Message):
    __slots__ = ("available", "message", "starting")
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    available: bool
    message: str
    starting: bool
    def __init__(self, available: bool = ..., message: _Optional[str] = ..., starting: bool = ...) -> None: ...

class FitEnded(_message.Message):
    __slots__ = ("fit", "history")
    FIT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    fit: int
    history: str
    def __init__(self, fit: _Optional[int] = ..., history: _Optional[str] = ...) -> None: ...

class StopFit(_message.Message):
    __slots__ = ("fit", "epochs")
    FIT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    fit: int
    epochs: int
    def __init__(self, fit: _Optional[int] = ..., epochs: _Optional[int] = ...) -> None: ...

class EpochMeeting(_message.Message):
    __slots__ = ("fit", "epoch", "after_callbacks", "waits", "stops", "epochs", "answers", "states")
    FIT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_CALLBACKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    fit: int
    epoch: int
    after_callbacks: bool
    waits: bool
    stops: bool
    epochs: int
    answers: bool
    states: _containers.RepeatedCompositeFieldContainer[MetricState]
    def __init__(self, fit: _Optional[int] = ..., epoch: _Optional[int] = ..., after_callbacks: bool = ..., waits: bool = ..., stops: bool = ..., epochs: _Optional[int] = ..., answers: bool = ..., states: _Optional[_Iterable[_Union[MetricState, _Mapping]]] = ...) -> None: ...

class MetricState(_message.Message):
    __slots__ = ("name", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: bytes
    def __init__(self, name: _Optional[str] = ..., values: _Optional[bytes] = ...) -> None: ...

class Chief(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    def __init__(self, worker: _Optional[int] = ...) -> None: ...

class Halt(_message.Message):
    __slots__ = ("cause", "message")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    message: str
    def __init__(self, cause: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
