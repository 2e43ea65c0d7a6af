// Package control is the API of a running agent: HTTP with JSON over a unix socket, under /v1/.
//
// The socket has mode 0600 in a directory of mode 0700, and SO_PEERCRED identifies the client: only root and the
// agent's own user are accepted. There is no other authentication and no network access.
//
// JSON names of this package stay, and fields are only added. Events and logs are streams of lines. An error is an
// HTTP status with {"error", "kind"}; the client restores the kind for errors.Is.
package control
