#!/usr/bin/python3
"""What lossctl shows of a server over several devices."""
import re
import socket
import unittest

from lossctl_harness import SERVER_FLAGS, LossctlTest
from waiting import wait_until

RANK_KEYS = {"rank", "device", "device_description", "pci_bus_id", "host", "memory_limit_bytes", "memory_reserved_bytes",
             "uptime_seconds", "waited_seconds", "command", "command_seconds", "waits_at", "stuck"}


class Ranks(LossctlTest):
    @classmethod
    def server_flags(cls):
        return [*SERVER_FLAGS, "--devices=cpu,cpu"]

    def when_known(self):
        """What every rank has, once the other one has told of the head."""
        def known():
            memory = self.succeed_json("memory")
            return all("h" in rank["heads"] for rank in memory["ranks"]) and memory

        return wait_until(known, "the head at every rank")

    def test_memory_is_that_of_every_rank(self):
        self.succeed("head", "create", "h", "--vocab", "4096", "--hidden", "64", "--dtype", "fp32")
        memory = self.when_known()
        self.assertEqual([rank["rank"] for rank in memory["ranks"]], [0, 1])
        for rank in memory["ranks"]:
            self.assertEqual(rank["heads"]["h"]["weights"], 2048 * 64 * 4)
            self.assertEqual(rank["reserved_bytes"],
                             sum(sum(items.values()) for items in [*rank["heads"].values(), rank["shared"]]))
        for key in ("limit_bytes", "reserved_bytes", "heads", "shared"):
            self.assertEqual(memory["ranks"][0][key], memory[key], "what is not of a rank is the leader's")
        text = self.succeed("memory")
        self.assertRegex(text, r"(?m)^RANK +RESERVED +LIMIT +DEVICE +OF +PROCESS +PEAK$")
        self.assertRegex(text, r"(?m)^RANK +HEAD +PURPOSE +SIZE$")
        for rank in (0, 1):
            self.assertRegex(text, rf"(?m)^ +{rank} +[\d.]+ MiB +384\.0 MiB  #*\.* ")
            self.assertRegex(text, rf"(?m)^ +{rank} +h +weights +512\.0 KiB  #*\.*$")

    def test_status_shows_the_ranks(self):
        status = self.succeed_json("status")
        self.assertEqual(status["group_epoch"], 1)
        self.assertEqual([rank["rank"] for rank in status["ranks"]], [0, 1])
        for rank in status["ranks"]:
            self.assertEqual(set(rank), RANK_KEYS)
            self.assertEqual((rank["device"], rank["memory_limit_bytes"]), ("cpu", 402653184))
        text = self.succeed("status")
        self.assertRegex(text, r"(?m)^RANK +HOST +DEVICE +RESERVED +LIMIT +WAITED +COMMAND$")
        for rank in (0, 1):
            self.assertRegex(text, rf"(?m)^ +{rank} +{re.escape(socket.gethostname())} +cpu +[\d.]+ MiB +384\.0 MiB +\S+ \S+ \([\d.]+ %\)  ")


if __name__ == "__main__":
    unittest.main()
