// Package e2e tests Holdfast end to end: a host, a shim process, plugins behind real sockets and real mounts. The tests
// believe the plugins' journal of calls, the kernel's mount table and files on disk.
//
// An env is a host in the test's process with plugins of package csifake. An agentEnv is an agent with its tasks as
// processes. The scripts in testdata/script run the programs as an operator does.
package e2e
