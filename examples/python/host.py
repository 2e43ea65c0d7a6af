#!/usr/bin/python3
"""A small orchestrator in Python. docs/hosts.md explains what it has to do.

    host.py SHIM PLUGIN-PROGRAM [ARGUMENT...]

It starts the shim, runs one CSI plugin as a task, creates a volume, mounts it into a task that writes a file and then
into one that reads it, deletes the volume, and ends plugin and shim. It needs root, and the Debian packages
python3-grpcio, python3-protobuf, protobuf-compiler, libprotobuf-dev and openssl.
"""

import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

import grpc

from shim import Shim

PLUGIN = """
task "plugin" {
  driver = "exec"
  csi_plugin {
    id   = "loopfs"
    type = "monolith"
  }
}"""

VOLUME = """
id           = "notes"
name         = "notes"
plugin_id    = "loopfs"
capacity_min = "32MiB"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}"""

USER = """
job "notes" {
  group "notes" {
    volume "notes" {
      type            = "csi"
      source          = "notes"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    task "notes" {
      driver = "exec"
      volume_mount {
        volume      = "notes"
        destination = "/notes"
      }
    }
  }
}"""

# What every task sees of the host, beside what its plan binds.
SYSTEM = ["/bin", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr"]


def main(shim_program, *plugin_command):
    work = tempfile.mkdtemp(prefix="hf-")
    for name in "state", "run", "data":
        os.mkdir(f"{work}/{name}", 0o700)
    shim = Shim(os.path.abspath(shim_program), f"{work}/state", f"{work}/run", ["dir", "bind", "env"])
    try:
        shim.activate()  # nothing runs yet
        run(shim, work, [os.path.abspath(plugin_command[0]), *plugin_command[1:], "--data", f"{work}/data"])
    except grpc.RpcError as e:
        raise SystemExit(f"{e.code().name}: {e.details()}")
    finally:
        shim.stop()
        # A host that continues later would leave all this in place. The shim has made two directories shared mounts.
        subprocess.run(["umount", f"{work}/state/mnt", f"{work}/run"], check=False)
        subprocess.run(["rm", "-rf", "--one-file-system", work], check=True)  # never the content of a mount


def run(shim, work, plugin_command):
    task = parse(shim, PLUGIN).groups[0].tasks[0]
    plugin = start_plugin(shim, work, task, plugin_command)
    try:
        await_plugin(shim)
        use_plugin(shim, work)
    finally:
        stop_plugin(shim, task.name, plugin)


def use_plugin(shim, work):
    parsed = shim.call("Volumes/Parse", source={"name": "notes.volume.hcl", "text": VOLUME.encode()})
    volume = shim.call("Volumes/Create", spec=parsed.spec).volume
    print(f"volume {volume.spec.id}: {volume.state}, {volume.capacity} bytes")

    use_volume(shim, work, "writer", "echo written by Python > /notes/line")
    line = use_volume(shim, work, "reader", "cat /notes/line")
    print("read:", line.strip())
    if line != "written by Python\n":
        raise SystemExit("that is not what was written")

    shim.call("Volumes/Delete", name={"namespace": volume.spec.namespace, "id": volume.spec.id})


def parse(shim, text):
    reply = shim.call("Jobs/Parse", source={"name": "job.hcl", "text": text.encode()})
    for d in reply.diagnostics:
        print(f"{d.file}:{d.start.line}: {d.severity}: {d.summary}: {d.detail}")
    return reply.job  # empty if a diagnostic is an error


def start_plugin(shim, work, task, command):
    """Starts the task of a plugin, and returns its process."""
    key = {"alloc": "plugin-1", "task": task.name}
    plan = shim.call("Tasks/Starting", task={
        "task": key, "job": "loopfs", "attempt": 1, "isolated": True, "sealed": task.sealed}).plan
    process = start(work, plan, command, f"{work}/data", os.path.dirname(command[0]))
    shim.call("Tasks/Started", task=key, attempt=1, at=boot_time(shim))
    return process


def await_plugin(shim):
    """Returns once the controller and the node part of the plugin are healthy."""
    index, healthy = 0, set()
    while len(healthy) < 2:
        reply = shim.call("Plugins/List", plugin="loopfs", page={"min_index": index})
        index = reply.answer.index  # the next call waits for a change
        for i in reply.instances:
            if i.health.state == "healthy" and i.key.role not in healthy:
                healthy.add(i.key.role)
                print(f"{i.key.role} {i.key.plugin}: {i.fingerprint.provider} {i.health.state}")


def stop_plugin(shim, name, process):
    key = {"alloc": "plugin-1", "task": name}
    try:
        shim.call("Tasks/Stopping", task=key, attempt=1)
    finally:
        process.terminate()
        process.wait()
    code = process.returncode  # below zero: minus the signal
    shim.call("Tasks/Exited", task=key, attempt=1, code=max(code, 0), signal=max(-code, 0), final=True)


def use_volume(shim, work, alloc, command):
    """Runs a command with the volume mounted, in an alloc of its own, and returns its output."""
    job = parse(shim, USER)
    group = job.groups[0]
    try:
        plans = shim.call("Allocs/Prepare", alloc={
            "alloc": alloc, "job": job.id, "group": group.name, "namespace": job.namespace, "sealed": group.sealed,
            "isolated": {group.tasks[0].name: True}}).plans
        task = start(work, plans[group.tasks[0].name], ["/bin/sh", "-ec", command], stdout=subprocess.PIPE)
        output, _ = task.communicate()
        if task.returncode:
            raise SystemExit(f"the task of alloc {alloc} failed with {task.returncode}")
        return output.decode()
    finally:
        shim.call("Allocs/Release", alloc=alloc)


def start(work, plan, command, *shown, **options):
    """Starts a task in a mount namespace and a root directory of its own, to which the plan is applied."""
    root = tempfile.mkdtemp(dir=work)
    environment = {"PATH": os.environ["PATH"]}
    # The mounts of the task must not appear on the host. Those that it makes in a bidirectional bind must: the shim has
    # made the source of such a bind a shared mount, and mount(8) keeps that unless it is changed.
    script = [f"mount --make-private $(findmnt -nro TARGET --target {root})", f"mount -t tmpfs tmpfs {root}"]
    for path in *SYSTEM, *shown:
        script.append(bind(path, path, root))
    for operation in plan.operations:
        kind = operation.WhichOneof("operation")
        if kind == "dir":
            script.append(f"mkdir -p -m {operation.dir.mode:o} {shlex.quote(root + operation.dir.path)}")
        elif kind == "bind":
            script += apply_bind(operation.bind, root)
        elif kind == "env":
            environment.setdefault(operation.env.name, operation.env.value)
        else:  # Hello has not listed it, so this cannot be
            raise SystemExit(f"unknown operation {operation.name} in a plan")
    script.append(f"exec chroot {root} {shlex.join(command)}")
    return subprocess.Popen(["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", "\n".join(script)],
                            env=environment, **options)


def apply_bind(b, root):
    target = shlex.quote(root + b.target)
    propagation = {"private": "rprivate", "host-to-task": "rslave", "bidirectional": "rshared"}[b.propagation]
    yield bind(b.source, b.target, root)
    yield f"mount --make-{propagation} {target}"
    if b.read_only:
        yield f"mount -o remount,bind,ro {target}"


def bind(source, target, root):
    source, target = shlex.quote(source), shlex.quote(root + target)
    return f"if [ -e {source} ]; then mkdir -p {target}; mount --rbind {source} {target}; fi"


def boot_time(shim):
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    at = shim.messages["BootTime"](boot_id=boot)
    at.since_boot.FromNanoseconds(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    return at


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
