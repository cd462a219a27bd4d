"""Certificates of an authority of one's own, for tests: by openssl, as docs/security.md makes them."""
import os
import subprocess
from pathlib import Path

LOOPBACK = "DNS:localhost,IP:127.0.0.1"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments):
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr}")


class Authority:
    """In `folder`: its own certificate `ca.pem`, and of whoever it vouches for NAME.pem with the key NAME.key.

    `suffix`: of certificates, if not .pem. All are good for `days`.
    """

    def __init__(self, folder, days=30, suffix=".pem"):
        self.folder, self._days, self._suffix = Path(folder), days, suffix
        _openssl("req", "-x509", *_NEW_KEY, "-days", days, "-subj", "/CN=ca", "-keyout", self.key("ca"),
                 "-out", self.certificate("ca"))

    def certificate(self, name):
        return self.folder / (name + self._suffix)

    def key(self, name):
        return self.folder / f"{name}.key"

    def issue(self, name, subject_names=LOOPBACK):
        """A new key and a certificate of it, each put in its place whole, as others may be reading what is there."""
        new_key = self.folder / f"{name}.key.new"
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-addext", f"subjectAltName={subject_names}",
                 "-keyout", new_key, "-out", self.folder / f"{name}.csr")
        os.replace(new_key, self.key(name))
        self._sign(name, self._days)

    def expire(self, name):
        """The certificate anew, of the same key, and over already."""
        self._sign(name, 0)

    def _sign(self, name, days):
        new_certificate = self.folder / f"{name}.new"
        _openssl("x509", "-req", "-days", days, "-CAcreateserial", "-in", self.folder / f"{name}.csr", "-CA",
                 self.certificate("ca"), "-CAkey", self.key("ca"), "-copy_extensions", "copy", "-out", new_certificate)
        os.replace(new_certificate, self.certificate(name))

    def server_flags(self, name="server"):
        return [f"--tls_certificate={self.certificate(name)}", f"--tls_key={self.key(name)}"]
