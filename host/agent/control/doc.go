// Package control is how a running agent is looked at and told what to do: HTTP with JSON over a unix socket, under /v1/.
//
// The socket has mode 0600 in a directory of mode 0700, and the kernel says who is at its other end: root and the agent's own user are let
// in, everybody else's connection is closed. There is no other authentication, and no way in over a network.
//
// The structures of this package are what the API speaks: their JSON names stay, fields are only added. Answers that go on (events, notes,
// logs) are streams of lines, each written when it happens. An error is a status and {"error", "kind"}; errors.Is against package registry's
// kinds holds at the client too.
package control
