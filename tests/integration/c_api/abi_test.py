#!/usr/bin/python3
"""Checks that liblossd_c.so shows what lossd/c_api.h declares, and that what is made from the header is made from this one.

Programs that are compiled already rely on abi.txt: lines may be added to it, none may change. A struct that grows says so in
its size, and the fields behind the old end are new lines.

usage: abi_test.py NM CC LIBRARY
"""
import ctypes
import difflib
import os
import runpy
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../tools"))
import c_api_tables  # noqa: E402


def check_functions(nm, library, interface):
    lines = subprocess.run([nm, "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout.splitlines()
    # The version's own name is an absolute symbol.
    exported = {line.split()[-1].split("@")[0] for line in lines if line.split()[1] != "A"}
    declared = set(interface.functions)
    if declared != exported:
        sys.exit(f"declared but not exported: {sorted(declared - exported)}\n"
                 f"exported but not declared: {sorted(exported - declared)}")


def check_files(compiler):
    for path, text in c_api_tables.made(compiler).items():
        with open(path, encoding="utf-8") as file:
            committed = file.read()
        if committed != text:
            name = os.path.relpath(path, c_api_tables.ROOT)
            changes = difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "made", n=0, lineterm="")
            sys.exit(f"{name} is not what is made from lossd/c_api.h; run tools/c_api_tables.py\n" + "\n".join(changes))


def check_ctypes(compiler, interface):
    """ctypes lays the structs out as the compiler does."""
    module = runpy.run_path(c_api_tables.PYTHON_MODULE)
    found = []
    for struct, fields in interface.structs.items():
        made = module[c_api_tables.python_name(struct)]
        found.append(f"{struct} size {ctypes.sizeof(made)}")
        found += [f"{struct}.{name} {getattr(made, name).offset} {getattr(made, name).size}" for name in fields]
    expected = [line for line in c_api_tables.layout(interface, compiler) if line.split()[0].split(".")[0] in interface.structs]
    if found != expected:
        changes = difflib.unified_diff(expected, found, "C", "ctypes", n=0, lineterm="")
        sys.exit("ctypes lays structs out in another way than the compiler\n" + "\n".join(changes))
    return len(found)


def main():
    nm, compiler, library = sys.argv[1:]
    interface = c_api_tables.Interface(compiler)
    check_functions(nm, library, interface)
    check_files(compiler)
    places = check_ctypes(compiler, interface)
    print(f"{len(interface.functions)} functions and {places} places in structs as committed")


if __name__ == "__main__":
    main()
