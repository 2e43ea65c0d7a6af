package volumeplugin

import (
	"context"
	"fmt"
	"strings"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

// group returns the parsed group of an alloc that uses the volume as a directory. The host knows no schema of volumes.
// Therefore group writes a job as text, and the shim parses it.
func (s *Server) group(ctx context.Context, v host.VolumeStatus) (hooks.Group, error) {
	access, found := registry.AccessMode(""), false
	for _, c := range v.Capabilities {
		if c.Attachment == registry.FileSystem && (!found || access.ReaderOnly()) {
			access, found = c.Access, true
		}
	}
	if !found {
		return hooks.Group{}, registry.Errorf(registry.ErrUnsupported,
			"volume %q is a block device; an engine mounts only volumes with a file system", v.ID)
	}
	text := fmt.Sprintf(`job "container-engine" {
  group "volume" {
    volume "volume" {
      type            = "csi"
      source          = %s
      access_mode     = %s
      attachment_mode = "file-system"
      read_only       = %t
    }
    task "engine" {
      driver = "exec"
      config {
        command = "true"
      }
      volume_mount {
        volume      = "volume"
        destination = "/volume"
      }
    }
  }
}`, quote(string(v.ID)), quote(string(access)), access.ReaderOnly())
	job, _, err := s.storage.Parse(ctx, host.Source{Name: "volume.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return hooks.Group{}, err
	}
	return job.Groups[0], nil
}

// quote returns a string literal of HCL.
func quote(text string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "${", "$${", "%{", "%%{").Replace(text) + `"`
}
