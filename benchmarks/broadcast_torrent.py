"""One libtorrent process of bench_broadcast: `python -m benchmarks.broadcast_torrent FOLDER INDEX`; a baseline.

The same orders on stdin and lines on stdout as broadcast_peer. Method `libtorrent` keeps the library's defaults but for
what has no place here (DHT, uTP, local discovery); `libtorrent tuned` unchokes everyone and keeps long request queues.
All know each other's addresses from the start and open connections when told to go.
"""

from __future__ import annotations

import json
import resource
import select
import sys
import time
from pathlib import Path
from typing import Any

import libtorrent
import xxhash

from benchmarks import priority

PIECE_BYTES = 256 << 10
BASE = {
    "enable_dht": False, "enable_lsd": False, "enable_upnp": False, "enable_natpmp": False,
    "enable_incoming_utp": False, "enable_outgoing_utp": False, "allow_multiple_connections_per_ip": True,
}  # fmt: skip
TUNED = {
    "unchoke_slots_limit": 64, "unchoke_interval": 2, "optimistic_unchoke_interval": 4,
    "max_out_request_queue": 1500, "max_allowed_in_request_queue": 4000, "request_queue_time": 2,
    "send_buffer_watermark": 1 << 20, "send_buffer_low_watermark": 1 << 17, "connection_speed": 500,
    "torrent_connect_boost": 100, "smooth_connects": False, "min_reconnect_time": 1,
    "close_redundant_connections": False, "peer_turnover": 0, "request_timeout": 8, "piece_timeout": 4,
    "whole_pieces_threshold": 1, "piece_extent_affinity": False, "mixed_mode_algorithm": 0,
}  # fmt: skip


def _torrent(folder: Path) -> Any:
    """The torrent of FOLDER/source: the seed makes it, the others wait for it."""
    path = folder / "source.torrent"
    while not path.exists():
        time.sleep(0.05)
    return libtorrent.torrent_info(str(path))


def _make_torrent(folder: Path) -> None:
    files = libtorrent.file_storage()
    files.add_file("source", (folder / "source").stat().st_size)
    made = libtorrent.create_torrent(files, PIECE_BYTES, libtorrent.create_torrent.v1_only)
    libtorrent.set_piece_hashes(made, str(folder))
    temporary = folder / "source.torrent.new"
    temporary.write_bytes(libtorrent.bencode(made.generate()))
    temporary.rename(folder / "source.torrent")


def _begin(folder: Path, scene: dict[str, Any], index: int, session: Any) -> Any:
    parameters = libtorrent.add_torrent_params()
    parameters.ti = _torrent(folder)
    place = folder if index == 0 else folder / scene["nodes"][index]["name"] / "files"
    place.mkdir(exist_ok=True)
    parameters.save_path = str(place)
    parameters.flags &= ~(libtorrent.torrent_flags.auto_managed | libtorrent.torrent_flags.paused)
    if index == 0:
        parameters.flags |= libtorrent.torrent_flags.seed_mode
    handle = session.add_torrent(parameters)
    for node in scene["nodes"]:
        host, port = node["address"].rsplit(":", 1)
        if node is not scene["nodes"][index] and not node["is_natted"]:
            handle.connect_peer((host.strip("[]"), int(port)))
    return handle


def _wait_for(session: Any, kind: Any) -> float:
    while True:
        session.wait_for_alert(100)
        for alert in session.pop_alerts():
            if isinstance(alert, kind):
                return time.monotonic()


def run(folder: Path, index: int) -> None:
    scene = json.loads((folder / "scene.json").read_text())
    if scene["is_lifted"]:
        priority.lift()
    mine = scene["nodes"][index]
    if index == 0:
        _make_torrent(folder)
    alerts = (
        libtorrent.alert.category_t.status_notification
        | libtorrent.alert.category_t.storage_notification
        | libtorrent.alert.category_t.error_notification
    )
    settings = BASE | (TUNED if scene["method"] == "libtorrent tuned" else {})
    session = libtorrent.session(settings | {"listen_interfaces": mine["address"], "alert_mask": alerts})
    _torrent(folder)
    print("READY", flush=True)
    sys.stdin.readline()
    before, begun_at = _cpu_s(), time.monotonic()
    handle = _begin(folder, scene, index, session)
    result: dict[str, Any] = {"name": mine["name"], "topology": "swarm"}
    if index == 0:
        result["begun_at"] = begun_at
    else:
        result["done_at"] = _wait_for(session, libtorrent.torrent_finished_alert)
        handle.flush_cache()  # all pieces were checked; some may not be written yet
        _wait_for(session, libtorrent.cache_flushed_alert)
        result["digest"] = xxhash.xxh3_128((folder / mine["name"] / "files" / "source").read_bytes()).hexdigest()
    print(json.dumps(result), flush=True)
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        session.pop_alerts()
    status = handle.status()
    last = {
        "sent": status.total_payload_upload, "received": status.total_payload_download,
        "duplicates": status.total_redundant_bytes, "pulled": 0, "cpu_s": _cpu_s() - before,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip
    print(json.dumps(last), flush=True)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
