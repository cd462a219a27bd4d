#!/usr/bin/python3
"""The hosts that other tests here use are what they are said to be: apart, named, slow, lossy, cut where they are cut, and gone."""
from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import unittest

from hosts import Host, Hosts, isolate
from programs import Program
from waiting import PATIENCE, wait_until

PORT = 7000


def listener(host: Host) -> socket.socket:
    found = host.open_socket(socket.SOCK_DGRAM)
    found.bind((host.address, PORT))
    return found


def send(sender: socket.socket, receiver: Host, text: bytes) -> None:
    sender.sendto(text, (receiver.address, PORT))


class HostsTest(unittest.TestCase):
    def test_each_has_a_name_an_address_and_a_network_of_its_own(self) -> None:
        with Hosts(2) as hosts, listener(hosts[0]), listener(hosts[1]):  # one port, twice
            self.assertEqual([host.run("uname", "-n").stdout.strip() for host in hosts], ["node0", "node1"])
            for host in hosts:
                self.assertIn(host.address, host.run("ip", "-brief", "address").stdout)
                self.assertIn(hosts[1].address, host.run("getent", "hosts", "node1").stdout)

    def test_what_is_sent_arrives_when_the_delay_is_over(self) -> None:
        for delay_ms, arrives in ((2, True), (3600_000, False)):
            with Hosts(2, delay_ms=delay_ms, loss=0) as hosts, listener(hosts[1]) as second, listener(hosts.here) as here:
                for sender, target, arrives_at in ((here, hosts[1], second), (second, hosts.here, here)):
                    send(sender, target, b"slowly")
                    hosts.heal()  # the wire does it behind what was sent before
                    if arrives:
                        self.assertEqual(arrives_at.recv(100), b"slowly")
                    else:
                        self.assertRaises(BlockingIOError, arrives_at.recv, 100, socket.MSG_DONTWAIT)

    def test_a_cut_is_of_one_direction_until_it_is_healed(self) -> None:
        with Hosts(2, loss=0) as hosts, listener(hosts[0]) as first, listener(hosts[1]) as second:
            hosts.cut(hosts[0], hosts[1])
            send(first, hosts[1], b"lost")
            send(second, hosts[0], b"arrives")
            self.assertEqual(first.recv(100), b"arrives")
            hosts.heal()
            send(first, hosts[1], b"after it was healed")
            self.assertEqual(second.recv(100), b"after it was healed")

    def test_hosts_are_parted_both_ways_from_those_named(self) -> None:
        with (Hosts(2, loss=0) as hosts, listener(hosts[0]) as first, listener(hosts[1]) as second,
              listener(hosts.here) as here):
            hosts.part([hosts[0]], [hosts[1], hosts.here])
            send(first, hosts[1], b"cut")
            send(second, hosts[0], b"cut, too")
            send(here, hosts[0], b"and this")
            send(here, hosts[1], b"others do not notice")
            self.assertEqual(second.recv(100), b"others do not notice")
            hosts.heal()
            send(second, hosts[0], b"healed")
            self.assertEqual(first.recv(100), b"healed")

    def test_packets_are_lost_where_they_are_to_be(self) -> None:
        sent = 200
        with Hosts(2, delay_ms=0, loss=0) as hosts, listener(hosts[0]) as sender, listener(hosts[1]) as receiver:
            hosts[1].lose(0.5)
            for _ in range(sent):
                send(sender, hosts[1], b"perhaps")
                send(receiver, hosts[0], b"surely")
            arrived = 0

            def all_are_counted() -> bool:
                nonlocal arrived
                with contextlib.suppress(BlockingIOError):
                    while True:
                        receiver.recv(100, socket.MSG_DONTWAIT)
                        arrived += 1
                return arrived + hosts[1].lost() == sent

            wait_until(all_are_counted, lambda: f"{sent} packets: {arrived} arrived, {hosts[1].lost()} were lost")
            self.assertTrue(0 < arrived < sent, arrived)
            self.assertEqual(hosts[0].lost(), 0)

    def test_nothing_is_left_of_a_program_that_was_killed(self) -> None:
        reads, writes = os.pipe()
        with Program(sys.executable, __file__, "hang", log=os.devnull, stdout=subprocess.PIPE, pass_fds=[writes], text=True) as program:
            os.close(writes)
            self.assertEqual(program.read_line(), "hangs\n")
            program.kill()
            nobody_has_the_other_end, _, _ = select.select([reads], [], [], PATIENCE)
            self.assertTrue(nobody_has_the_other_end)
            self.assertEqual(os.read(reads, 1), b"")
        os.close(reads)


def hang() -> None:
    with Hosts(1) as hosts:
        Program(*hosts[0].command("sleep", "infinity"), log=os.devnull, close_fds=False).start()
        print("hangs", flush=True)
        signal.pause()


if __name__ == "__main__":
    isolate()
    if sys.argv[1:] == ["hang"]:
        hang()
    else:
        unittest.main()
