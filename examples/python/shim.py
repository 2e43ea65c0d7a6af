"""Starts a shim and calls it: the handshake, certificates and callbacks of docs/hosts.md."""

import base64
import fcntl
import hashlib
import importlib
import os
import pathlib
import queue
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import uuid

import grpc

COOKIE = "b1b5d3c0-holdfast-shim"
PROTOCOL = 1
MAX_MESSAGE = 16 << 20
START_TIMEOUT = 10
PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"


class Shim:
    """One shim process. state and run are directories of mode 0700 that no other host uses."""

    def __init__(self, program, state, run, operations):
        self.state, self.run = state, run
        self.tmp = tempfile.TemporaryDirectory()
        self.messages, self.services = generate(self.tmp.name)
        self.lock = open(f"{state}/host.lock", "w")
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.sockets = tempfile.mkdtemp(prefix="shim-", dir=run)  # mode 0700
        key, certificate = make_certificate(self.tmp.name)
        self.start(program, certificate)
        self.connect(self.handshake(), key, certificate)
        self.call("Control/Hello", host_version="python", node=os.uname().nodename, operations=operations,
                  state_dir=state, run_dir=run)

    def start(self, program, certificate):
        """Verifies the program and executes the very file that was verified."""
        with open(program, "rb") as binary:
            digest = hashlib.sha256(binary.read()).hexdigest()
            if digest != pathlib.Path(program + ".sha256").read_text().split()[0]:
                raise SystemExit(f"{program} has the SHA-256 {digest}, not that of {program}.sha256")
            life, self.life = os.pipe()  # the shim ends when self.life is closed, which the kernel does if this dies
            environment = {
                "PATH": os.environ["PATH"],
                "HOLDFAST_SHIM": COOKIE,
                "HOLDFAST_LIFE_FD": str(life),
                "PLUGIN_PROTOCOL_VERSIONS": str(PROTOCOL),
                "PLUGIN_UNIX_SOCKET_DIR": self.sockets,
                "PLUGIN_CLIENT_CERT": certificate.decode(),
            }
            self.process = subprocess.Popen(
                ["holdfast-shim", "-log-level", "warn"], executable=f"/proc/{os.getpid()}/fd/{binary.fileno()}",
                cwd="/", env=environment, pass_fds=[life], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            os.close(life)

    def handshake(self):
        """Returns socket and certificate of the shim. It prints one line: 1|1|unix|SOCKET|grpc|CERTIFICATE."""
        killer = threading.Timer(START_TIMEOUT, self.process.kill)
        killer.start()
        line = self.process.stdout.readline(16 << 10).decode().strip()
        killer.cancel()
        fields = line.split("|")
        if len(fields) < 6 or fields[:3] + fields[4:5] != ["1", str(PROTOCOL), "unix", "grpc"]:
            raise SystemExit(f"the shim did not start; its handshake is {line!r}")
        address, certificate = fields[3], fields[5]
        if os.path.dirname(address) != self.sockets:
            raise SystemExit(f"the shim listens at {address}, outside of {self.sockets}")
        return address, base64.b64decode(certificate + "=" * (-len(certificate) % 4))

    def connect(self, handshake, key, certificate):
        address, server = handshake
        credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(server).encode(), key, certificate)
        self.channel = grpc.secure_channel("unix:" + address, credentials, [
            ("grpc.ssl_target_name_override", "localhost"), ("grpc.default_authority", "localhost"),
            ("grpc.max_send_message_length", MAX_MESSAGE), ("grpc.max_receive_message_length", MAX_MESSAGE),
        ])

    def activate(self, **workload):
        """Makes the shim active and tells it what runs. It takes down everything else that it has in its records."""
        self.call("Control/Activate")
        self.call("Allocs/Sync", **workload)
        threading.Thread(target=self.serve_callbacks, daemon=True).start()

    def serve_callbacks(self):
        """Answers the shim's questions, on a stream that the host opens."""
        reply = self.messages["CallbackReply"]
        replies = queue.SimpleQueue()
        replies.put(reply())  # opens the stream
        try:
            for ask in self.method("Callbacks/Serve")(iter(replies.get, None)):
                secret = ask.secret.name.removeprefix("env:")
                if ask.HasField("secret") and secret in os.environ:
                    replies.put(reply(id=ask.id, value=os.environ[secret].encode()))
                else:
                    replies.put(reply(id=ask.id, kind="ERROR_KIND_UNSUPPORTED", error="this host has no such value"))
        except grpc.RpcError:
            pass  # the shim has ended

    def call(self, method, timeout=60, **fields):
        """Makes a call, such as Tasks/Starting. A stream of answers is returned as an iterator."""
        service, name = method.split("/")
        request = self.messages[self.services[service].methods_by_name[name].input_type.name](**fields)
        request.call.operation_id = uuid.uuid4().hex  # a repetition of the same call has to carry the same ID
        return self.method(method)(request, timeout=timeout)

    def method(self, method):
        service, name = method.split("/")
        m = self.services[service].methods_by_name[name]
        kinds = {(False, False): self.channel.unary_unary, (False, True): self.channel.unary_stream,
                 (True, True): self.channel.stream_stream}
        return kinds[m.client_streaming, m.server_streaming](
            f"/{m.containing_service.full_name}/{name}", self.messages[m.input_type.name].SerializeToString,
            self.messages[m.output_type.name].FromString)

    def stop(self):
        """Ends the shim. Mounts, tasks and records stay."""
        os.close(self.life)
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.channel.close()
        shutil.rmtree(self.sockets)  # a shim that was killed leaves its socket
        self.tmp.cleanup()


def generate(into):
    """Generates the messages of the .proto files. Returns all of them, and all services, by name."""
    files = sorted(PROTO.glob("holdfast/v1/*.proto"))
    subprocess.run(["protoc", f"-I{PROTO}", f"--python_out={into}", *map(str, files)], check=True)
    sys.path.insert(0, into)
    messages, services = {}, {}
    for file in files:
        module = importlib.import_module(f"holdfast.v1.{file.stem}_pb2")
        messages.update({name: getattr(module, name) for name in module.DESCRIPTOR.message_types_by_name})
        services.update(module.DESCRIPTOR.services_by_name)
    return messages, services


def make_certificate(into):
    """Makes a key and a certificate for this process. Returns both as PEM."""
    key, certificate = pathlib.Path(into, "key.pem"), pathlib.Path(into, "certificate.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-days", "36500", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
                    "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key.read_bytes(), certificate.read_bytes()
