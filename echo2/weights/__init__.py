"""Weight deltas: lossless, near the entropy bound, at memory speed.

A version travels as a container: a header frame, independent block frames and an end frame, which the broadcast may pack into
chunks in any way; `FrameReader` reassembles them. Typical use:

    learner   header = DeltaHeader(target_version=.., parent_version=Version(0),
                                   parent_fingerprint=fingerprint(weights, key), fingerprint_key=key)
              frames = encode_delta(weights, snapshot, header, CodecSetting.DENSE)# frames.fingerprint after the last
    worker    decoder = ContainerDecoder(host)
              decoder.feed(frame)                                             # in any order, as they come
              host.commit(decoder.finish())                                   # verified; wholly or not at all

`compose` merges deltas without weights; `warm_up` compiles the kernels ahead, once per machine. Names are the Hugging Face ones;
of tied tensors one name is kept. Every call that takes weights reads their raw bits and never converts them.
"""

from echo2.weights.container import CodecSetting, DeltaHeader, FrameReader, parse_frame
from echo2.weights.decode import ContainerDecoder, StagedDelta, warm_up
from echo2.weights.elements import WeightSet, untied
from echo2.weights.encode import (
    Encoding,
    compose,
    encode_delta,
    encode_keyframe,
    encode_sections,
    section_blocks,
    section_fingerprint,
)  # fmt: skip
from echo2.weights.fingerprint import fingerprint, fingerprint_tensor
from echo2.weights.host import HostWeights, apply_updates, table_of

__all__ = [
    "CodecSetting", "ContainerDecoder", "DeltaHeader", "Encoding", "FrameReader", "HostWeights",
    "StagedDelta", "WeightSet", "apply_updates", "compose", "encode_delta", "encode_keyframe",
    "encode_sections", "fingerprint", "fingerprint_tensor", "parse_frame", "section_blocks",
    "section_fingerprint", "table_of", "untied", "warm_up",
]  # fmt: skip
