// Package sanity runs csi-sanity (kubernetes-csi/csi-test) against loopfs in each of its configurations: make sanity,
// as root.
//
// csi-sanity skips specs for capabilities that a driver does not announce. So the list of skips is part of the test: a
// skipped spec that is not on it fails, and so does a spec on it that runs. At the end no mount, loop device or file
// may be left.
//
// It is a module of its own, so that the main module does not need the dependencies of csi-sanity.
package sanity
