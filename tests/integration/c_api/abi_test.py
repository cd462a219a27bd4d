#!/usr/bin/python3
"""Compares what liblossd_c.so shows, and how the structs of lossd/c_api.h lie in memory, with the committed abi.txt.

Programs that are compiled already rely on all of it: lines may be added to abi.txt, none may change. A struct that grows
says so in its size, and the fields behind the old end are new lines.

usage: abi_test.py NM CC LIBRARY HEADER ABI [--write]   with --write, ABI is written anew
"""
import re
import subprocess
import sys
import tempfile

CALL = re.compile(r"\b(lossd_[a-z0-9_]+)\s*\(")
STRUCT = re.compile(r"typedef struct (lossd_[a-z0-9_]+) \{(.*?)\} \1;", re.DOTALL)
ENUM = re.compile(r"typedef enum (lossd_[a-z0-9_]+) \{(.*?)\} \1;", re.DOTALL)
FIELD = re.compile(r"(?:\(\*(\w+)\)\([^)]*\)|(\w+)(?:\[\w+\])?)\s*;")


def without_comments(header):
    return re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)


def declared_functions(header):
    found = re.findall(r"LOSSD_API\s[^;]*?;", header, flags=re.DOTALL)
    return sorted(CALL.search(declaration).group(1) for declaration in found)


def exported_functions(nm, library):
    lines = subprocess.run([nm, "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout.splitlines()
    # The version's own name is an absolute symbol.
    return sorted(line.split()[-1].split("@")[0] for line in lines if line.split()[1] != "A")


def layout(compiler, header_path, header):
    """Lines "struct field offset bytes" and "enum NAME value", as the compiler has them."""
    prints = []
    for struct, body in STRUCT.findall(header):
        prints.append(f'printf("{struct} size %zu\\n", sizeof({struct}));')
        for pointer, plain in FIELD.findall(body):
            field = pointer or plain
            prints.append(f'printf("{struct}.{field} %zu %zu\\n", offsetof({struct}, {field}), sizeof((({struct}*)0)->{field}));')
    for enum, body in ENUM.findall(header):
        for name in re.findall(r"\b(LOSSD_\w+)", body):
            prints.append(f'printf("{enum} {name} %d\\n", (int){name});')
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/layout.c", "w", encoding="utf-8") as file:
            file.write(f'#include "{header_path}"\n#include <stdio.h>\nint main(void) {{\n' + "\n".join(prints) + "\nreturn 0;\n}\n")
        subprocess.run([compiler, "-std=c99", "-pedantic", "-Werror", f"{folder}/layout.c", "-o", f"{folder}/layout"], check=True)
        return subprocess.run([f"{folder}/layout"], check=True, capture_output=True, text=True).stdout.splitlines()


def main():
    nm, compiler, library, header_path, abi_path, *write = sys.argv[1:]
    with open(header_path, encoding="utf-8") as file:
        header = without_comments(file.read())
    declared, exported = declared_functions(header), exported_functions(nm, library)
    if declared != exported:
        sys.exit(f"declared but not exported: {sorted(set(declared) - set(exported))}\n"
                 f"exported but not declared: {sorted(set(exported) - set(declared))}")
    found = [f"function {name}" for name in exported] + layout(compiler, header_path, header)
    if write == ["--write"]:
        with open(abi_path, "w", encoding="utf-8") as file:
            file.write("\n".join(found) + "\n")
        return
    with open(abi_path, encoding="utf-8") as file:
        committed = file.read().splitlines()
    gone, new = [line for line in committed if line not in found], [line for line in found if line not in committed]
    if gone or new:
        sys.exit("the interface is not that of abi.txt\n" + "\n".join([f"- {line}" for line in gone] + [f"+ {line}" for line in new]))
    print(f"{len(found)} lines as committed")


if __name__ == "__main__":
    main()
