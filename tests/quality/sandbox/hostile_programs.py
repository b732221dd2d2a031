"""Programs that want out, or want to pass: none of them doubles a number.

Each defines `double`. SECRET_PATH, PORT and PARENT are filled in by the test: the file of a secret, the port
that somebody listens on, and the process of the test.
"""

HOSTILE = {
    "fork bomb": """
import os
def double(x):
    while True:
        try:
            os.fork()
        except OSError:
            pass
""",
    "thread bomb": """
import threading, time
def double(x):
    while True:
        threading.Thread(target=time.sleep, args=(1000,)).start()
""",
    "memory bomb": """
def double(x):
    held = []
    while True:
        held.append(bytearray(2**24))
""",
    "memory in files without a name": """
import os
def double(x):
    while True:
        os.write(os.memfd_create("m"), bytes(2**22))
""",
    "memory that belongs to nobody": """
import ctypes
def double(x):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    made = 0
    for _ in range(50):
        held = libc.shmget(0, 2**26, 0o1600)
        place = libc.shmat(held, None, 0) if held >= 0 else None
        if place not in (None, 2**64 - 1):
            ctypes.memset(place, 1, 2**26)
            libc.shmdt(ctypes.c_void_p(place))
            made += 1
    print("MADE", made)
    return 4 if made else None
""",
    "empty files": """
import itertools
def double(x):
    for n in itertools.count():
        try:
            open(f"/tmp/{n}", "w").close()
        except OSError:
            print("FILES", n < 5000)
            return 4 if n >= 5000 else None
""",
    "keys of the user": """
import ctypes
def double(x):
    libc = ctypes.CDLL(None, use_errno=True)
    found = [libc.syscall(250, 0, key, 0) for key in (-1, -2, -3, -4, -5)]
    print("KEYS", [each for each in found if each >= 0])
    return 4 if max(found) >= 0 else None
""",
    "the end of an iteration": "def double(x): raise StopIteration\n",
    "half a character": "def double(x): return 4  # \ud800\n",
    "disk bomb": """
import itertools
def double(x):
    for n in itertools.count():
        with open(f"/tmp/{n}", "wb") as f:
            f.write(bytes(2**22))
""",
    "a loop that takes no signal": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
def double(x):
    while True:
        pass
""",
    "sleeps": "import time\ndef double(x): time.sleep(1000)\n",
    "writes outside": """
import os, sys, sysconfig
def double(x):
    done = []
    for path in (SECRET_PATH, "/box/candidate.py", "/escaped", os.path.dirname(SECRET_PATH) + "/escaped",
                 sysconfig.get_path("stdlib") + "/escaped.py", sys.executable, "/proc/sysrq-trigger",
                 "/proc/1/oom_score_adj", "/dev/null.new"):
        try:
            with open(path, "a") as file:
                file.write("ESCAPED")
            done.append(path)
        except OSError:
            pass
    print("WROTE", done)
    return 4 if done else None
""",
    "reads /etc/shadow": """
def double(x):
    print("SHADOW", open("/etc/shadow").read())
    return 4
""",
    "reads a secret": """
import glob
def double(x):
    for path in (SECRET_PATH, "/proc/1/root" + SECRET_PATH, "/proc/self/root/.." + SECRET_PATH,
                 *glob.glob("/tmp/**", recursive=True), *glob.glob("/root/**", recursive=True)):
        try:
            print(open(path).read()[:100])
        except (OSError, UnicodeDecodeError):
            pass
""",
    "reads the environment": """
import glob, os
def double(x):
    print(dict(os.environ))
    for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
        try:
            print(open(path, "rb").read())
        except OSError:
            pass
""",
    "connects": """
import socket
def double(x):
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        try:
            socket.create_connection((host, PORT), timeout=1).sendall(b"ESCAPED")
        except OSError as error:
            print(host, error)
    for name in (b"\\0stackwise-test-PORT",):
        try:
            s = socket.socket(socket.AF_UNIX)
            s.connect(name)
            s.sendall(b"ESCAPED")
        except OSError as error:
            print(error)
""",
    "sockets of other families": """
import ctypes, platform, socket
def double(x):
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 41, "aarch64": 198}.get(platform.machine())
    pair, opened = (ctypes.c_int * 2)(), []
    for family in set(range(64)) - {1, 2, 10}:  # AF_UNIX, AF_INET, AF_INET6
        for kind in (1, 2, 3, 5):
            # The kernel looks at the lower half of a register only.
            found = [libc.socket(family, kind, 0), -abs(libc.socketpair(family, kind, 0, pair)),
                     libc.syscall(number, ctypes.c_long(family | 1 << 32), kind, 0) if number else -1]
            opened += [(family, kind)] if found != [-1, -1, -1] else []
    try:
        socket.socket(40).connect((2, PORT))  # AF_VSOCK: the host of a virtual machine
        opened.append("host")
    except OSError:
        pass
    print("OPENED", opened)
    return 4 if opened else None
""",
    "signals its parent": """
import os, signal
def double(x):
    for pid in (os.getppid(), 1, PARENT, -1):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    try:
        os.killpg(os.getpgid(0), signal.SIGKILL)
    except OSError:
        pass
""",
    "signals everybody": """
import os, signal
def double(x):
    for pid in range(1, 70000):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
""",
    "traces": """
import ctypes, os
def double(x):
    libc = ctypes.CDLL(None, use_errno=True)
    attached = [pid for pid in range(1, 3000) if pid != os.getpid() and libc.ptrace(16, pid, None, None) == 0]
    print("ATTACHED", attached)
    return 4 if attached else None
""",
    "prints without end": """
import sys
def double(x):
    while True:
        sys.stdout.write("spam " * 10000)
""",
    "os._exit(0)": "import os\ndef double(x): os._exit(0)\n",
    "os._exit(0) at import": "import os\nos._exit(0)\n",
    "sys.exit": "import sys\ndef double(x): sys.exit(0)\n",
    "sys.exit at import": "import sys\nsys.exit(0)\n",
    "a forged nonce": """
import json, os, struct
def double(x):
    for nonce in ("", "0" * 32, None, True, [1]):
        body = json.dumps({"nonce": nonce}).encode()
        for descriptor in range(256):
            try:
                os.write(descriptor, struct.pack("!I", len(body)) + body)
            except OSError:
                pass
    os._exit(0)
""",
    "looks for the nonce": """
import gc, glob, json, os, struct
def double(x):
    found = []
    for path in glob.glob("/box/*") + glob.glob("/proc/*/mem") + glob.glob("/proc/*/fd/*"):
        try:
            found.append(open(path, "rb").read(10000))
        except (OSError, ValueError):
            pass
    for each in gc.get_objects():
        if isinstance(each, dict) and "nonce" in each:
            found.append(json.dumps(each).encode())
    print([each for each in found if b"nonce" in each])
""",
    "equals everything": """
class Everything:
    __eq__ = __ne__ = __lt__ = __bool__ = lambda *_: True
    __hash__ = None
def double(x): return Everything()
""",
    "a number that equals everything": """
class Everything(int):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = int.__hash__
    __index__ = lambda _: 4
    __int__ = lambda _: 4
def double(x): return Everything(-1)
""",
    "a text that is a number": """
class Four(str):
    __eq__ = lambda *_: True
def double(x): return Four("4")
""",
    "replaces builtins": """
import builtins, sys
builtins.AssertionError = type("AssertionError", (BaseException,), {})
builtins.compile = builtins.exec = lambda *_, **__: None
builtins.isinstance = lambda *_: True
sys.modules["plain"].decode = lambda *_: (4,)
def double(x): return None
""",
    "atexit": """
import atexit, os
atexit.register(os._exit, 0)
def double(x): raise SystemExit
""",
    "a thread that goes on": """
import os, threading, time
def go_on():
    while True:
        time.sleep(0.01)
threading.Thread(target=go_on).start()
def double(x): raise KeyboardInterrupt
""",
    "leaves a daemon behind": """
import os, time
def double(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(64):
                try:
                    os.close(descriptor)
                except OSError:
                    pass
            time.sleep(1000)
        os._exit(0)
""",
    "reads its channel": """
import os
def double(x):
    while True:
        os.read(3, 1000)
""",
    "a message of four gigabytes": "import os\ndef double(x): os.write(3, b'\\xff' * 8)\n",
    "a message that is none": "import os\ndef double(x): os.write(3, b'\\0\\0\\0\\4spam')\n",
    "a message without end": """
import os, struct
def double(x):
    os.write(3, struct.pack("!I", 2**24))
    while True:
        os.write(3, b"[" * 65536)
""",
    "values within values": """
import os, struct
def double(x):
    body = b'{"value": ' + b'{"list": [' * 50000 + b']}' * 50000 + b', "args": null}'
    os.write(3, struct.pack("!I", len(body)) + body)
""",
    "a number of ten million digits": """
import json, os, struct
def double(x):
    body = json.dumps({"value": {"int": "f" * 10_000_000}, "args": None}).encode()
    message = struct.pack("!I", len(body)) + body
    while message:
        message = message[os.write(3, message):]
""",
    "what pickle would run": """
class Run:
    def __reduce__(self): return print, ("ESCAPED",)
def double(x): return Run()
""",
    "numbers without end": "import itertools\ndef double(x): return itertools.count()\n",
    "namespaces": """
import ctypes, os
def double(x):
    libc = ctypes.CDLL(None, use_errno=True)
    made = [flag for flag in (0x10000000, 0x00020000, 0x40000000) if libc.unshare(flag) == 0]
    mounted = libc.mount(b"tmpfs", b"/box", b"tmpfs", 0, None) == 0
    try:
        os.chroot("/proc")
        mounted = True
    except OSError:
        pass
    print("MADE", made, mounted)
    return 4 if mounted else None
""",
    "another user": """
import os
def double(x):
    for become in (os.setuid, os.setgid):
        try:
            become(0)
            print("BECAME", become)
        except OSError:
            pass
""",
    "a dead interpreter": "import ctypes\ndef double(x): ctypes.string_at(0)\n",
    "a full stack": """
import sys
sys.setrecursionlimit(10**9)
def double(x): return double(x)
""",
    "a power": "def double(x): return 9 ** 9 ** 9\n",
    "brackets": "(" * 100_000,
    "an error that cannot be printed": """
class Odd(Exception):
    def __str__(self): raise SystemExit
def double(x): raise Odd
""",
    "an error of the checks": "def double(x): raise SystemExit('passed')\n",
    "no function": "",
}
