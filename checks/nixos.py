"""The NixOS module gives, for every example host, the unit that the profile's own renderer gives, and files that hold.

spec: failures and counts (of nix/nixos/tests.nix), examples ({name: services, instances, ports, etc}), unbuilt
(arguments of the host file's builder, and what it says), options (names below services.hyperqwen), docs
(docs/nixos.md), root (with checks/units.py), tools (systemd-analyze).

Runs in the environment of `hyperqwen`, whose renderer and schema the module has to agree with.
"""

import itertools
import json
import os
import pathlib
import shlex
import subprocess
import sys
from typing import Any

with open(os.environ["specPath"]) as spec_file:
    SPEC = json.load(spec_file)
sys.path.insert(0, f"{SPEC['root']}/checks")

from units import THRESHOLD, Tools, spoilt

from hyperqwen.delivery.unit import MODELS, Unit, service_config
from hyperqwen.profiles.layers import Effective, resolve

# What an instance of the module has of its own: its file instead of variables, its folders.
OWN = {"ExecStart", "ExecStartPre", "Environment", "EnvironmentFile", "StateDirectory", "CacheDirectory",
       "RuntimeDirectory"}  # fmt: skip


def render(service: "dict[str, Any]") -> str:
    """The unit file that NixOS writes of a service: one line a value, lists as several, truth as words."""

    def lines(section: "dict[str, Any]") -> "list[str]":
        out = []
        for key, value in sorted(section.items()):
            for item in value if isinstance(value, list) else [value]:
                out.append(f"{key}={str(item).lower() if isinstance(item, bool) else item}")
        return out

    unit = {"Description": service["description"], **service["unitConfig"]}
    unit |= {key.title(): " ".join(service[key]) for key in ("wants", "after") if service[key]}
    environment = [f'"{name}={value}"' for name, value in sorted(service["environment"].items())]
    body = {"Environment": environment, **service["serviceConfig"]}
    return "\n".join(["[Unit]", *lines(unit), "", "[Service]", *lines(body), ""])


def section(unit: Unit, name: str) -> "dict[str, list[str]]":
    """Each key of a section with the values of its lines, a list-valued key of [Unit] split into names."""
    found: dict[str, list[str]] = {}
    for directive in unit.sections[name]:
        for line in directive.lines():
            key, _, value = line.partition("=")
            found.setdefault(key, []).extend(value.split() if key in ("Wants", "After") else [value])
    return found


def module_section(text: str, name: str) -> "dict[str, list[str]]":
    """The same of a rendered unit; NixOS says true and false where systemd's own pages say yes and no."""
    body = text.split(f"[{name}]\n")[1].split("\n\n")[0]
    found: dict[str, list[str]] = {}
    for line in body.splitlines():
        key, _, value = line.partition("=")
        value = {"true": "yes", "false": "no"}.get(value, value)
        found.setdefault(key, []).extend(value.split() if key in ("Wants", "After") else [value])
    return found


def profile_problems(effective: Effective, instance: "dict[str, Any]") -> "list[str]":
    """Where the resolved profile does not have what the example says."""
    wanted = {f"{name}.{key}": value for name, keys in instance["settings"].items() for key, value in keys.items()}
    wanted |= {"server.host": instance["host"], "server.port": instance["port"]}
    if instance["gpus"]:
        wanted["parallel.gpus"] = ",".join(map(str, instance["gpus"]))
    problems = []
    for path, value in wanted.items():
        if effective.profile.get(path) != value:
            problems.append(f"{path} is {effective.profile.get(path)!r}, and the example says {value!r}")
        if effective.sources[path].kind != "host file":
            problems.append(f"{path} comes from {effective.sources[path]}, not from the host file")
    extra = {path for path, source in effective.sources.items() if source.kind == "host file"} - set(wanted)
    return problems + [f"the host file also sets {path}" for path in sorted(extra)]


def service_problems(service: "dict[str, Any]", instance: "dict[str, Any]") -> "list[str]":
    """Where the service is not what `hyperqwen.delivery.unit` makes of the same profile."""
    config = service["serviceConfig"]
    words = shlex.split(config["ExecStart"])
    program, host_file = words[0], words[-1]
    # With the host file, all that the module knows has to be there: nothing of this machine counts.
    effective = resolve(instance["profile"], host_file=pathlib.Path(host_file), environ={})
    problems = profile_problems(effective, instance)
    unit = service_config(
        effective.profile,
        program=program,
        key=instance["apiKeyFile"],
        models=instance["modelDir"] or MODELS,
        clients=instance["clients"],
    )
    text = render(service)
    for part in ("Unit", "Service"):
        want, got = section(unit, part), module_section(text, part)
        for key in sorted((set(want) | set(got)) - OWN):
            if want.get(key) != got.get(key):
                problems.append(f"[{part}] {key} is {got.get(key)}, and the unit file has {want.get(key)}")
    command = f"{program} --profile {instance['profile']} --verbose --host-file {host_file}"
    if config["ExecStart"] != command:
        problems.append(f"ExecStart is {config['ExecStart']}, not {command}")
    before = section(unit, "Service").get("ExecStartPre", [])
    ours = [line.replace(section(unit, "Service")["ExecStart"][0], command) for line in before]
    if module_section(text, "Service").get("ExecStartPre", []) != ours:
        problems.append(f"ExecStartPre is {config.get('ExecStartPre')}, not {ours}")
    return problems


def folder_problems(name: str, service: "dict[str, Any]") -> "list[str]":
    """Where a service does not keep to folders of its own."""
    config = service["serviceConfig"]
    folders = {config[key] for key in ("StateDirectory", "CacheDirectory", "RuntimeDirectory")}
    expected = f"hyperqwen/{name.removeprefix('hyperqwen').removeprefix('-') or 'default'}"
    variables = {
        "HOME": f"/var/lib/{expected}",
        "HYPERQWEN_CACHE_DIR": f"/var/cache/{expected}",
        "HYPERQWEN_MODELS": MODELS,
    }
    if folders != {expected} or service["environment"] != variables:
        return [f"{name} has the folders {sorted(folders)} and the variables {service['environment']}"]
    return []


def command_problems(service: "dict[str, Any]", instance: "dict[str, Any]") -> "list[str]":
    """Whether the command of the service, really run, plans what the example says. Needs no card and no model."""
    command = [*shlex.split(service["serviceConfig"]["ExecStart"]), "--print-argv"]
    variables = {**service["environment"], "LC_ALL": "C.UTF-8"}
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if result.returncode:
        # A profile that this engine refuses, it refuses without this host's settings as well.
        alone = [command[0], "--profile", instance["profile"], "--print-argv"]
        refused = subprocess.run(alone, capture_output=True, text=True, env=variables)
        if (result.returncode, result.stderr) != (refused.returncode, refused.stderr):
            return [f"{shlex.join(command)} ends with {result.returncode}:\n{result.stderr}"]
    words = shlex.split(result.stdout)
    flags = {"--host": instance["host"], "--port": str(instance["port"])}
    limits = instance["settings"]["limits"]
    names = {"--max-model-len": "context_tokens", "--max-num-seqs": "concurrent_requests"}
    flags |= {flag: str(limits[key]) for flag, key in names.items() if key in limits}
    given = dict(itertools.pairwise(words))
    return [
        f"{flag} is {given.get(flag)} in the engine's flags, and the example says {value}"
        for flag, value in flags.items()
        if given.get(flag) != value
    ]


def example_problems(name: str, example: "dict[str, Any]") -> "list[str]":
    """All that is wrong with the services of one example."""
    if set(example["services"]) != set(example["instances"]) or not example["services"]:
        return [f"{name} has the services {sorted(example['services'])} of {sorted(example['instances'])}"]
    problems = [
        f"{name}: {service}: {problem}"
        for service, value in example["services"].items()
        for check in (service_problems, command_problems)
        for problem in check(value, example["instances"][service])
    ]
    problems += [
        f"{name}: {problem}"
        for service, value in example["services"].items()
        for problem in folder_problems(service, value)
    ]
    default = example["services"].get("hyperqwen")
    linked = {"hyperqwen/host.toml": shlex.split(default["serviceConfig"]["ExecStart"])[-1]} if default else {}
    if example["etc"] != linked:
        problems.append(f"{name}: /etc has {example['etc']}, not {linked}")
    return problems


def unbuilt_problems(case: "dict[str, Any]", out: pathlib.Path) -> "list[str]":
    """Whether the builder of the host file refuses what evaluation lets through, in these words."""
    command = [sys.executable, "-I", "-B", "-m", "hyperqwen.delivery.host_file", *case["arguments"], "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, env={"LC_ALL": "C.UTF-8"})
    if result.returncode != 2 or result.stderr != f"hyperqwen: {case['says']}\n" or out.exists():
        return [f"{case['arguments']} ends with {result.returncode} and\n{result.stderr}rather than\n{case['says']}"]
    return []


def main() -> None:
    build = pathlib.Path(os.environ["NIX_BUILD_TOP"])
    problems = list(SPEC["failures"])
    for name, example in sorted(SPEC["examples"].items()):
        problems += example_problems(name, example)
    for case in SPEC["unbuilt"]:
        problems += unbuilt_problems(case, build / "host.toml")
    page = pathlib.Path(SPEC["docs"]).read_text()
    problems += [f"docs/nixos.md has no `{name}`" for name in SPEC["options"] if f"`{name}`" not in page]

    tools = Tools(SPEC["tools"], build)
    exposures = []
    for name, example in sorted(SPEC["examples"].items()):
        for service, value in sorted(example["services"].items()):
            unit = build / name / f"{service}.service"
            unit.parent.mkdir(exist_ok=True)
            unit.write_text(render(value))
            if text := tools.complaints(unit):
                problems.append(f"{name}: {service}: systemd-analyze verify:\n{text}")
            exposure, over, assessment = tools.exposure(unit)
            exposures.append(exposure)
            if over:
                problems.append(f"{name}: {service}: exposure {exposure} is over {THRESHOLD / 10}\n{assessment}")
            bad = spoilt(unit, build / name / "spoilt", r"^ProtectSystem=", "ProtectSytem=")
            if "ProtectSytem" not in tools.complaints(bad):
                problems.append(f"{name}: {service}: verify does not see a misspelt key")
    if not exposures or not SPEC["unbuilt"] or not SPEC["options"]:
        problems.append("nothing was checked")
    if problems:
        sys.exit("\n".join(problems))
    counts = SPEC["counts"]
    report = (
        f"{counts['examples']} example hosts with {len(exposures)} services: the units of delivery.unit, verify clean, "
        f"commands run, exposure at most {max(exposures)}\n"
        f"refused: {counts['refused']} by assertion, {counts['mistyped']} by type, {len(SPEC['unbuilt'])} at build\n"
        f"{counts['harness']} tests of the module system; all {len(SPEC['options'])} options are in docs/nixos.md\n"
    )
    print(report)
    with open(os.environ["out"], "w") as file:
        file.write(report)


main()
