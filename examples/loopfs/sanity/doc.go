// Package sanity runs csi-sanity (kubernetes-csi/csi-test), which knows nothing of loopfs, against a real loopfs in
// each of its configurations: `make sanity`, as root.
//
// csi-sanity skips what a driver does not announce. So the list of what is skipped is part of the test: a spec that is
// not on it and is skipped fails, and so does one that is on it and runs. In the end nothing may be left: no mount, no
// loop device, no file.
//
// It is a module of its own, so that the main module does not need the dependencies of csi-sanity.
package sanity
