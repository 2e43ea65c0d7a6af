// Package hooks computes plans: what has to be done to a task or an alloc so that CSI works in it.
//
// Everything here is pure: functions from data to data. A Preparation lists the directories that the shim makes on the
// host and the socket that must not be stale; a Plan lists what the host applies to a task: directories, bind mounts,
// environment, devices and cgroup device rules. A new kind of operation needs a rebuild of every host, so the set is
// small, named and negotiated (Operations). Layout is the on-disk tree: the one place where ids become
// paths, by hashing.
//
// The package also declares the inputs of plans that people write (PluginSpec, VolumeRequest, VolumeMount) and the form
// in which a parsed job travels (Job). In a Job, the orchestrator's part is JSON. Holdfast's part is sealed, so that a
// host carries fields that it does not know. The package imports only package registry.
package hooks
