"""Reading what anybody may have written: a clear error, or the one before; nothing runs."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from stackwise.checkpoint import CheckpointManager, CheckpointWarning, DamagedCheckpointError
from stackwise.checkpoint.folder import MANIFEST, Manifest, verify_files

FILES = [MANIFEST, "state-00000.json", "state-00000.safetensors", "tensors/rank-00000.safetensors"]
AUDITED = (
    "os.system",
    "subprocess.Popen",
    "pickle.find_class",
    "os.exec",
    "socket.connect",
    "exec",
    "compile",
)
OPENED = set()
_auditing = [False]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def _audit(event, arguments):
    if _auditing[0]:
        if event in AUDITED:
            OPENED.add(f"{event} {arguments}"[:200])
        elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            OPENED.add(f"open {arguments}")


sys.addaudithook(_audit)  # there for good, and silent but in `watched`


class watched:  # noqa: N801
    """Fails if anything runs or is opened for writing inside."""

    def __enter__(self):
        OPENED.clear()
        _auditing[0] = True

    def __exit__(self, *_):
        _auditing[0] = False
        assert not OPENED


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    manager = CheckpointManager(directory)
    torch.manual_seed(0)
    for step in (1, 2):
        manager.save(step, objects(float(step)), notes={"a": [1, 2]}, metric=0.5)
    restored = objects(0.0)
    manager.restore(restored)  # what is imported on the way is imported
    return directory


def objects(value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return {"model": model, "state": {"x": torch.full((4,), value), "b": b"bytes", "t": (1, {2: 3})}}


def changed(original, tmp_path_factory, name, content):
    directory = tmp_path_factory.mktemp("changed") / "run"
    shutil.copytree(original, directory)
    (directory / "step-2" / name).write_bytes(content)
    return directory


def check_passed_over(directory, name):
    manager, found = CheckpointManager(directory), objects(0.0)
    before = sorted(names_in(directory.parent))
    with watched():
        with pytest.raises(DamagedCheckpointError) as raised:
            manager.restore(found, 2)
        with pytest.warns(CheckpointWarning, match="step-2"):
            assert manager.restore(found).step == 1
    assert raised.value.folder == directory / "step-2"
    assert raised.value.file == name
    assert found["model"].weight[0, 0] == 1.0
    assert sorted(names_in(directory.parent)) == before
    shutil.rmtree(directory)


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_bit_of_any_file(original, tmp_path_factory, data):
    name = data.draw(st.sampled_from(FILES))
    content = bytearray((original / "step-2" / name).read_bytes())
    kind = data.draw(st.sampled_from(["flip", "truncate", "bytes", "append", "insert"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "truncate":
        content = content[:place]
    elif kind == "append":
        content += data.draw(st.binary(min_size=1))
    elif kind == "insert":
        content[place:place] = data.draw(st.binary(min_size=1))
    else:
        new = data.draw(st.binary())
        content = new if new != content else b""
    if bytes(content) != (original / "step-2" / name).read_bytes():
        check_passed_over(changed(original, tmp_path_factory, name, bytes(content)), name)


def test_every_bit_of_the_list(original, tmp_path):
    """The file that all others are judged by."""
    directory = tmp_path / "run"
    shutil.copytree(original, directory)
    path = directory / "step-2" / MANIFEST
    content = path.read_bytes()
    manager = CheckpointManager(directory)
    manager.verify(2)
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpointError):
            manager.verify(2)


def signed(directory):
    """Make the list agree with the files: what somebody does who wants to be believed."""
    folder = directory / "step-2"
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("digest")
    for name in content["files"]:
        held = (folder / name).read_bytes()
        content["files"][name] = {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}
    content["digest"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    verify_files(folder, Manifest.read(folder).files)
    return directory


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/evil",)


def header(**tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


HOSTILE = {
    "a pickle": pickle.dumps(Evil()),
    "empty": b"",
    "a zip bomb's head": b"PK\x03\x04" + bytes(30),
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "an endless header": struct.pack("<Q", 2**62) + b"{}",
    "a huge tensor": header(x={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}),
    "overflowing": header(x={"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}),
    "negative": header(x={"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}),
    "unknown dtype": header(x={"dtype": "P32", "shape": [1], "data_offsets": [0, 4]}) + bytes(4),
    "no tensors": header(),
    "not JSON": b"{'a': 1}",
    "NaN": b'{"shared": NaN, "own": {}, "random": {}}',
    "wrong kinds": b'{"shared": [], "own": {}, "random": {}}',
    "nothing in it": b'{"shared": {}, "own": {}, "random": {}}',
    "a huge number": b'{"shared": {"model": ' + b"9" * 10_000 + b'}, "own": {}, "random": {}}',
}


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_with_a_list_that_agrees(original, tmp_path_factory, name, content):
    directory = signed(changed(original, tmp_path_factory, name, content))
    if name.endswith(".json") and content == HOSTILE["nothing in it"]:
        with pytest.raises(ValueError, match="allowed: what"):
            CheckpointManager(directory).restore(objects(0.0))
        return
    check_passed_over(directory, None)
    assert not Path("/tmp/evil").exists()


STATES = {
    "missing tensor": {"shared": {"model": {"$tensor": ["no", [1]]}}},
    "another shape": {"shared": {"model": {"$tensor": ["model.weight", [7, 7]]}}},
    "a huge shape": {"shared": {"model": {"$tensor": ["model.weight", [2**40, 2**40]]}}},
    "a huge array": {"own": {"state": {"$array": ["state.x", "<f8", [2**60]]}}},
    "an array of objects": {"own": {"state": {"$array": ["state.x", "|O8", [2]]}}},
    "an unknown kind": {"own": {"state": {"$import": "os"}}},
    "no random states": {"random": {}},
    "random states of another kind": {"random": {"torch": 1, "python": 2, "numpy": 3}},
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_hostile_states_with_a_list_that_agrees(original, tmp_path_factory, change):
    name = FILES[1]
    plain = json.loads((original / "step-2" / name).read_text())
    for part, values in change.items():
        plain[part] = {**plain[part], **values} if values else {}
        if part == "random":
            plain[part] = values
    content = json.dumps(plain).encode()
    check_passed_over(signed(changed(original, tmp_path_factory, name, content)), None)


@given(st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_json_with_a_list_that_agrees(original, tmp_path_factory, data):
    """Plain values of another shape: refused as damaged, or by the object that they do not fit."""
    scalars = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
    )
    kinds = st.sampled_from(["$tensor", "$array", "$tuple", "$dict", "$state_dict", "$set", "$counter", "a"])
    trees = st.recursive(
        scalars | st.just(["model.weight", [2, 3]]) | st.just(["state.x", "<f4", [1]]),
        lambda down: st.lists(down, max_size=3) | st.dictionaries(kinds, down, max_size=2),
        max_leaves=6,
    )
    plain = json.loads((original / "step-2" / FILES[1]).read_text())
    part, key = data.draw(st.sampled_from([("shared", "model"), ("own", "state"), ("random", "numpy")]))
    plain[part][key] = data.draw(trees)
    directory = signed(changed(original, tmp_path_factory, FILES[1], json.dumps(plain).encode()))
    manager, found = CheckpointManager(directory), objects(0.0)
    states = torch.get_rng_state()
    with watched():
        try:
            manager.restore(found, 2)
        except DamagedCheckpointError:
            assert found["model"].weight[0, 0] == 0.0
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
            pass  # of load_state_dict, or dict.update
    torch.set_rng_state(states)
    shutil.rmtree(directory)
