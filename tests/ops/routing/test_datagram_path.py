"""A codec's packet survives the path through router, datagrams and assembler."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.datagram_samples import MTU, SESSION, signed
from tests.ops.routers import BODIES, FLOAT, context, dense, entries_of, shard_of
from tests.virtual.toy import method
from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.routing.base import Manifest
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.packetizer import Packetizer
from thinwire.ops.routing.reassembler import Reassembler
from thinwire.ops.sharding.split import place_tensors, split_packet
from thinwire.ops.types import VALUE_DTYPES, ModelSpec, TensorSpec
from thinwire.ops.wire.low_rank import expanded

SPEC = ModelSpec(
    (TensorSpec("kernel", (9, 9)), TensorSpec("bias", (9,)), TensorSpec("thin", (1, 30)))
)


class Path:
    """One worker's path to one shard."""

    def __init__(self, policy, shard, layouts):
        self.policy, self.shard = policy, shard
        self.sizes = [piece.size for piece in layouts[shard].slices]
        self.sealer = Packetizer(SESSION, MTU, policy.dgt_channels)
        self.assembler = Reassembler(SESSION, self.sizes, policy)

    def send(self, step, routed, arrives):
        """Return the decoded values, and the lost parts."""
        sealed = self.sealer.seal(step, routed.unreliable)
        datagrams = signed(sealed)
        for number in np.random.default_rng(step).permutation(len(datagrams)):
            if arrives(number):
                self.assembler.feed(datagrams[number], len(datagrams[number]), 0.0)
        manifest = Manifest(
            sealed.announced,
            routed.k,
            routed.num_blocks,
            routed.num_skipped,
            routed.num_reliable,
            routed.num_dropped,
        )
        self.assembler.add_reliable(step, routed.reliable, manifest, 0.0)
        self.assembler.end_step(step, 0.0)
        assembled = self.assembler.close(0.0)
        return assembled, sealed.lost(assembled.bitmap) if assembled.bitmap is not None else None


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=5, deadline=None)
@given(
    k=st.sampled_from([0.0, 0.3, 1.0]),
    channels=st.integers(1, 7),
    seed=st.integers(0, 99),
    entries=st.sampled_from([1, 4, 7, 32]),
)
def test_without_loss_it_is_the_packet(codec, dtype, k, channels, seed, entries):
    overrides = {"codec": codec}
    chosen = method(
        "asgd", nb_workers=1, compression_rate=0.3, value_dtype=dtype, overrides=overrides
    ).codec
    policy = Dgt(dgt_k=k, dgt_channels=channels, dgt_block_size=4 * entries, dgt_clear_zero=False)
    layouts = place_tensors(SPEC, 2)
    state, codec_state = policy.init(layouts), chosen.init(SPEC, BODIES)
    paths = [Path(policy, shard, layouts) for shard in range(2)]
    rng = np.random.default_rng(seed)
    for step in (1, 2):
        gradients = [rng.standard_normal(tensor.size, FLOAT) for tensor in SPEC.tensors]
        packet, codec_state = chosen.encode(
            gradients, codec_state, EncodeContext(step, 0.1, rng, BODIES)
        )
        now = context(step)
        state = policy.begin(state, now)
        for path, blocks in zip(paths, split_packet(packet, layouts), strict=True):
            routed, state = policy.cut(path.shard, blocks, state, now)
            assembled, _ = path.send(step, routed, lambda number: True)
            assert (assembled.fresh, assembled.fill) == (1.0, 1.0)
            assert [block.slot for block in assembled.blocks] == [block.slot for block in blocks]
            for one, other in zip(assembled.blocks, blocks, strict=True):
                assert (one.indices is None) == (other.indices is None)
                if one.indices is not None:
                    np.testing.assert_array_equal(one.indices, other.indices)
            for one, other in zip(
                entries_of(map(expanded, assembled.blocks), path.sizes),
                entries_of(blocks, path.sizes),
                strict=True,
            ):
                assert one.tobytes() == other.tobytes()
            assert not any(path.assembler.counters.dropped.values())


@pytest.mark.parametrize("bits", [32, 8])
def test_what_is_lost_comes_with_the_next_step(bits):
    policy = Dgt(
        dgt_k=0.3,
        dgt_block_size=64,
        dgt_low_bits=bits,
        dgt_error_feedback=True,
        dgt_reception="drop",
    )
    layouts = shard_of(200, 60)
    path, state = Path(policy, 0, layouts), policy.init(layouts)
    rng = np.random.default_rng(1)
    gradients = [rng.standard_normal(size).astype(FLOAT) for size in path.sizes]
    total = [np.zeros(size, FLOAT) for size in path.sizes]
    for step, given_now in enumerate([gradients, *[[0 * each for each in gradients]] * 3], 1):
        now = context(step)
        state = policy.begin(state, now)
        blocks = tuple(dense(slot, each) for slot, each in enumerate(given_now))
        routed, state = policy.cut(0, blocks, state, now)
        assembled, lost = path.send(step, routed, lambda number, step=step: step > 1 or number % 2)
        assert bool(lost) == (step == 1)
        state = policy.undelivered(0, lost, state)
        for one, more in zip(total, entries_of(assembled.blocks, path.sizes), strict=True):
            one += more
    for one, other in zip(total, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=0 if bits == 32 else 1e-5)
