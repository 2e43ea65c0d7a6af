// Package volumeplugin serves the volume plugin protocol of Docker, which Podman speaks too: HTTP with JSON on a unix
// socket. It makes CSI volumes usable as "docker run -v notes:/data --volume-driver holdfast".
//
// A volume of an engine is a volume of Holdfast with the same ID. The engine sends an ID with each mount, and the agent
// counts the mounts of each ID: package agent has the records and the rules.
//
// The protocol: https://docs.docker.com/engine/extend/plugins_volume/
package volumeplugin
