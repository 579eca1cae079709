"""Weight deltas: lossless, near the entropy bound, at memory speed.

A version travels as a container: a header frame, independent block frames and an end frame, all bytes. The broadcast
may pack frames into chunks in any way; `FrameReader` reassembles them. Typical use:

    learner   base = HostWeights.from_tensors(weights, Version(0), key)
              header = DeltaHeader(target_version=.., parent_version=base.version,
                                   parent_fingerprint=base.fingerprint(), fingerprint_key=key)
              frames = encode_delta(base, snapshot, header, CodecSetting.DENSE)# frames.fingerprint after the last
    worker    decoder = ContainerDecoder(host)
              decoder.feed(frame)                                             # in any order, as they come
              staged = decoder.finish()                                       # verified; a `StagedVersion`
              host.commit(staged)                                             # wholly or not at all

A sharded learner encodes on the ranks that hold the weights: `section_blocks` on each rank, merged by
broadcast/runtime/sharded.py. `compose` merges deltas without weights; policy.py decides which pieces to fetch, which edges
to publish and what to keep. `warm_up` compiles the kernels ahead, once per machine. Names are the Hugging Face ones; of
tied tensors one name is kept (`untied`). Every call that takes weights reads their raw bits and never converts them.
`fingerprint(weights, key)` tells whether two nodes hold the same weights.
"""

from echo2.weights.compose import compose, densified
from echo2.weights.container import CodecSetting, DeltaHeader, FrameReader, join_frames, parse_frame
from echo2.weights.decode import ContainerDecoder, DecodeLimits, StagedDelta
from echo2.weights.device import apply_updates
from echo2.weights.elements import WeightSet, untied
from echo2.weights.encode import Encoding, encode_delta, encode_keyframe
from echo2.weights.fingerprint import fingerprint, fingerprint_tensor, fingerprint_update
from echo2.weights.host import HostWeights
from echo2.weights.shards import (
    encode_sections,
    section_blocks,
    section_fingerprint,
    sharded_table,
    whole_fingerprint,
)  # fmt: skip
from echo2.weights.warm import warm_up

__all__ = [
    "DecodeLimits",
    "ContainerDecoder",
    "DeltaHeader",
    "Encoding",
    "FrameReader",
    "HostWeights",
    "CodecSetting",
    "StagedDelta",
    "WeightSet",
    "apply_updates",
    "compose",
    "densified",
    "encode_delta",
    "encode_keyframe",
    "encode_sections",
    "fingerprint",
    "fingerprint_tensor",
    "fingerprint_update",
    "join_frames",
    "parse_frame",
    "section_blocks",
    "section_fingerprint",
    "sharded_table",
    "untied",
    "warm_up",
    "whole_fingerprint",
]
