"""The container images: reproducible, complete, readable by other tools, without a driver; and the demo's really runs.

spec: specs ({profile: description of its image}), changed (the demo's, with one patch less), stored ({layer: output of
oci_layer.py} for some of the demo's), tools (skopeo, umoci, bwrap), nano (the model directory).

The demo's image is written and unpacked below the build folder, 13 GB in all, and its rootfs is entered as a container
runtime would: another user, nothing else to see, the rootfs read-only, the entrypoint as process 1.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from hyperqwen.delivery import container, image, rootfs
from hyperqwen.prepare.truth import Truth

BUILD = pathlib.Path(os.environ["NIX_BUILD_TOP"])
KEY = "the-key-of-this-check"
LAYERS = ["base", "cuda", "torch", "wheels", "vllm", "engine", "code"]
# Layers that a changed patch writes again.
CHANGED = ["engine", "code"]
SMALL = ("engine", "code")
# What only the driver of the host may bring: one of another version in front of it, and no CUDA program starts.
DRIVER = re.compile(r"lib(cuda|cudadebugger|nvidia-ml|nvidia-ptxjitcompiler|nvidia-nvvm|nvcuvid)\.so(\.[0-9.]+)?")
START_SECONDS = 240


class Failures(list[str]):
    def expect(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.append(f"{what}: expected {expected!r}, found {found!r}")


def run(*command: str | pathlib.Path) -> "subprocess.CompletedProcess[str]":
    """Run to the end; another exit status than 0 ends the check."""
    result = subprocess.run(list(map(str, command)), text=True, capture_output=True, timeout=900)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nexit status {result.returncode}\n{result.stdout}{result.stderr}")
    return result


# Descriptions -----------------------------------------------------------------------------------------------------
def describe(specs: dict[str, image.Image], changed: image.Image, failures: Failures) -> None:
    """What can be said of every image without writing it."""
    for profile, made in specs.items():
        failures.expect(f"layers of {profile}", [layer.name for layer in made.layers], LAYERS)
        paths = [path for layer in made.layers for path in layer.paths]
        failures.expect(f"{profile}: paths in two layers", len(paths) - len(set(paths)), 0)
        program = made.config["Entrypoint"][0]
        if not any(program.startswith(f"{path}/") for path in made.layers[-1].paths):
            failures.append(f"{profile}: the entrypoint {program} is not in the topmost layer")
        failures.expect(f"{profile}: user", made.config["User"], f"{rootfs.USER}:{rootfs.USER}")
        if profile != "demo" and f"NVIDIA_REQUIRE_CUDA={container.NVIDIA_REQUIRE}" not in made.config["Env"]:
            failures.append(f"{profile}: no driver is required")
    for layer, other in zip(specs["demo"].layers, changed.layers, strict=True):
        failures.expect(f"a changed patch changes {layer.name}", layer != other, layer.name in CHANGED)
    everything = {path for made in specs.values() for layer in made.layers for path in layer.paths}
    failures += [f"a driver's library is in an image: {file}" for file in driver_files(everything)]
    for profile in set(specs) - {"demo", "B"}:
        failures.expect(f"layers of {profile} and B", specs[profile].layers, specs["B"].layers)


def driver_files(paths: set[str]) -> Iterator[str]:
    """Libraries of a driver below `paths`; stubs to link with are in folders called stubs, where no loader looks."""
    for path in paths:
        for folder, _, files in os.walk(path):
            if os.path.basename(folder) != "stubs":
                yield from (f"{folder}/{name}" for name in files if DRIVER.fullmatch(name))


# Formats ----------------------------------------------------------------------------------------------------------
def formats(tools: str, demo: image.Image, stored: dict[str, str], failures: Failures) -> str:
    """A part of the demo's image, written three times: the same digests each time, and for skopeo too."""
    part = image.Image(demo.reference, tuple(layer for layer in demo.layers if layer.name in SMALL), demo.config)
    folder, again, archive, copy = (BUILD / name for name in ("small", "again", "small.tar", "copy"))
    digest = image.write_layout(part, folder)
    failures.expect("digest of a second writing", image.write_layout(part, again), digest)
    failures.expect("digest of the archive", image.write_archive(part, archive), digest)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    for name in names:
        if (folder / name).read_bytes() != (again / name).read_bytes():
            failures.append(f"{name} differs when it is written again")
    manifest = read_manifest(folder, digest)
    for layer, entry in zip(part.layers, manifest["layers"], strict=True):
        with open(f"{stored[layer.name]}/layer.json") as file:
            kept = json.load(file)
        failures.expect(f"stored layer {layer.name}", kept["layer"], image.layer_json(layer))
        failures.expect(f"digest of stored layer {layer.name}", f"sha256:{kept['blob'][0]}", entry["digest"])
    skopeo = (f"{tools}/bin/skopeo", "--insecure-policy", "--tmpdir", BUILD)
    for source in (f"oci:{folder}:{part.tag}", f"oci-archive:{archive}:{part.tag}"):
        seen = json.loads(run(*skopeo, "inspect", source).stdout)
        failures.expect(f"skopeo's digest of {source}", seen["Digest"], digest)
        failures.expect(f"skopeo's labels of {source}", seen["Labels"], part.config["Labels"])
        failures.expect(
            f"skopeo's layers of {source}", seen["Layers"], [entry["digest"] for entry in manifest["layers"]]
        )
    # As docker load reads it: by name. Copying compares every digest with the bytes.
    run(*skopeo, "copy", f"docker-archive:{archive}:{part.reference}", f"oci:{copy}:copied")
    config = json.loads(run(*skopeo, "inspect", "--config", f"oci:{copy}:copied").stdout)
    failures.expect(
        "layers after docker-archive", config["rootfs"]["diff_ids"], [e["digest"] for e in manifest["layers"]]
    )
    for place in (folder, again, copy):
        shutil.rmtree(place)
    archive.unlink()
    return digest


def read_manifest(folder: pathlib.Path, digest: str) -> Any:
    return json.loads((folder / "blobs" / digest.replace(":", "/")).read_text())


def unpack(tools: str, demo: image.Image, failures: Failures) -> tuple[pathlib.Path, str]:
    """The demo's image written as a user would and unpacked by umoci: its rootfs, and what that took."""
    layout, root = BUILD / "layout", BUILD / "rootfs"
    began = time.monotonic()
    digest = image.write_layout(demo, layout)
    written = time.monotonic()
    seen = json.loads(run(f"{tools}/bin/skopeo", "--insecure-policy", "inspect", f"oci:{layout}:{demo.tag}").stdout)
    failures.expect("skopeo's digest of the demo", seen["Digest"], digest)
    size = sum(entry["size"] for entry in read_manifest(layout, digest)["layers"])
    # umoci compares every blob, and every layer in it, with its digest.
    run(f"{tools}/bin/umoci", "raw", "unpack", "--rootless", "--image", f"{layout}:{demo.tag}", root)
    unpacked = time.monotonic()
    shutil.rmtree(layout)
    for path in (path for layer in demo.layers for path in layer.paths):
        if not os.path.lexists(f"{root}{path}"):
            failures.append(f"{path} is not in the rootfs")
    return (
        root,
        f"{digest}: {size / 1e9:.2f} GB written in {written - began:.0f} s, unpacked in {unpacked - written:.0f} s",
    )


# Run --------------------------------------------------------------------------------------------------------------
class Box:
    """The rootfs as a container runtime sets it up: read-only, with a cache, a key, and no privileges."""

    def __init__(self, tools: str, root: pathlib.Path, made: image.Image, port: int) -> None:
        self.cache, self.key = BUILD / "cache", BUILD / "key"
        self.cache.mkdir(mode=0o700)
        self.key.write_text(f"{KEY}\n")
        self.key.chmod(0o400)
        variables = dict(entry.split("=", 1) for entry in made.config["Env"])
        variables |= {"HYPERQWEN_SERVER_API_KEY_FILE": "/run/key", "HYPERQWEN_SERVER_PORT": str(port)}
        self.prefix = [
            f"{tools}/bin/bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent",
            "--uid", str(rootfs.USER), "--gid", str(rootfs.USER), "--ro-bind", str(root), "/", "--proc", "/proc",
            "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(self.cache), rootfs.CACHE, "--tmpfs", "/run",
            "--ro-bind", str(self.key), "/run/key", "--chdir", made.config["WorkingDir"], "--clearenv",
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        ]  # fmt: skip
        self.entrypoint = made.config["Entrypoint"]
        _, *self.health = made.config["Healthcheck"]["Test"]

    def open_without_a_key(self) -> "subprocess.CompletedProcess[str]":
        """The entrypoint, told of no key: it listens beyond the container, and must refuse."""
        command = [*self.prefix, "--unsetenv", "HYPERQWEN_SERVER_API_KEY_FILE", *self.entrypoint]
        return subprocess.run(command, text=True, capture_output=True, timeout=60)

    def healthy(self) -> int:
        """Exit status of the image's own health command."""
        result = subprocess.run([*self.prefix, *self.health], text=True, capture_output=True, timeout=120)
        print(f"health: {result.returncode} {result.stdout.strip()} {result.stderr.strip()}")
        return result.returncode

    @contextlib.contextmanager
    def serving(self) -> Iterator[tuple["subprocess.Popen[str]", int]]:
        """The entrypoint, started: bwrap, and the process that is number 1 inside."""
        reader, writer = os.pipe()
        with (BUILD / "server.log").open("w") as log:
            server = subprocess.Popen(
                [self.prefix[0], "--info-fd", str(writer), *self.prefix[1:], *self.entrypoint],
                pass_fds=[writer],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        os.close(writer)
        try:
            with os.fdopen(reader) as info:
                text = info.read()
            if not text:
                sys.exit(f"bwrap did not start; are user namespaces allowed here?\n{self.log()}")
            yield server, json.loads(text)["child-pid"]
        finally:
            server.kill()
            server.wait()

    def log(self) -> str:
        return (BUILD / "server.log").read_text()


def serve(box: Box, port: int, truth: Truth, failures: Failures) -> str:
    """Start the image, ask it, let its health command judge it, hang it, stop it; a line about it."""
    began = time.monotonic()
    failures.expect("health without a server is 0", box.healthy() == 0, False)
    refused = box.open_without_a_key()
    failures.expect("exit status without a key", refused.returncode, 2)
    if "0.0.0.0" not in refused.stderr or "key" not in refused.stderr:
        failures.append(f"without a key it says: {refused.stderr}")
    prompt = next(prompt for prompt in truth.prompts if prompt["kind"] == "completion")
    body = {"model": "nano", "prompt": prompt["prompt"], "max_tokens": len(prompt["answer_ids"]), "temperature": 0}
    with (
        box.serving() as (server, first),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}) as client,
    ):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health", timeout=5).status_code == httpx.codes.OK:
                    break
            if server.poll() is not None or time.monotonic() - began > START_SECONDS:
                sys.exit(f"the image does not serve:\n{box.log()}")
            time.sleep(0.5)
        ready = time.monotonic() - began
        answer = client.post("/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]["text"]
        failures.expect(f"answer to {prompt['name']}", answer, prompt["answer"])
        failures.expect(
            "status without the key", httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).status_code, 401
        )
        failures.expect("health of a server that answers", box.healthy(), 0)
        engine = engine_of(first)
        os.kill(engine, signal.SIGSTOP)
        try:
            failures.expect("health of a server that hangs is 0", box.healthy() == 0, False)
        finally:
            os.kill(engine, signal.SIGCONT)
        # A container runtime signals process 1, for which no signal has a default action.
        os.kill(first, signal.SIGTERM)
        try:
            failures.expect("exit status after SIGTERM", server.wait(timeout=60), 0)
        except subprocess.TimeoutExpired:
            failures.append(f"process 1 does not end on SIGTERM:\n{box.log()[-2000:]}")
    if not any(box.cache.iterdir()):
        failures.append("nothing was written to the cache volume: where did it go?")
    if "Traceback" in box.log():
        failures.append(f"a traceback:\n{box.log()[-4000:]}")
    return f"answers from its rootfs {ready:.0f} s after the start"


def engine_of(first: int) -> int:
    """The process that has the model: of those below process 1, itself included, the one with the most memory."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = (int(fields[1]), int(fields[21]))
    family = {first}
    while True:
        grown = family | {process for process, (parent, _) in parents.items() if parent in family}
        if grown == family:
            return max(family, key=lambda process: parents[process][1])
        family = grown


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    os.environ |= {"HOME": str(BUILD), "TMPDIR": str(BUILD)}
    failures = Failures()
    specs = {profile: image.load(pathlib.Path(path)) for profile, path in spec["specs"].items()}
    demo, tools = specs["demo"], spec["tools"]
    describe(specs, image.load(pathlib.Path(spec["changed"])), failures)
    small = formats(tools, demo, spec["stored"], failures)
    root, written = unpack(tools, demo, failures)
    port = free_port()
    served = serve(Box(tools, root, demo, port), port, Truth.load(pathlib.Path(spec["nano"])), failures)
    if failures:
        sys.exit("\n".join(failures))
    report = f"{len(specs)} images described; {small} three times over\n{written}\n{served}\n"
    print(report)
    with open(os.environ["out"], "w") as file:
        file.write(report)


main()
