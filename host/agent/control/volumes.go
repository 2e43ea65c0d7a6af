package control

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// updateVolume changes a volume to match its changed file. With ?dry_run=true it only answers with the changes.
func (s *Server) updateVolume(r *http.Request, src Submission) (any, error) {
	spec, _, err := s.host.ParseVolume(r.Context(), source(src), ParseOptions(src))
	if err != nil {
		return nil, err
	}
	done, err := callPlugin(s, r, target{volume: spec.VolumeName(), plugin: spec.Plugin},
		func(ctx context.Context) (host.VolumeUpdate, error) {
			return s.host.UpdateVolume(ctx, spec, isTrue(r, "dry_run"))
		})
	done.Changes = append([]host.FieldChange{}, done.Changes...)
	return done, err
}

// adopt records a volume that exists at its plugin.
func (s *Server) adopt(ctx context.Context, spec host.VolumeSpec) (host.VolumeStatus, error) {
	if spec.External == "" {
		return host.VolumeStatus{}, registry.Invalid("volume %s has no external_id; "+
			"add the ID that the plugin uses: see holdfast volume list --external %s", spec.VolumeName(), spec.Plugin)
	}
	if _, err := s.knownPlugin(ctx, spec.Plugin); err != nil {
		return host.VolumeStatus{}, err
	}
	return s.host.AdoptVolume(ctx, spec)
}

// VolumesAt lists the volumes that a plugin has, including those without a record.
func (c *Client) VolumesAt(ctx context.Context, plugin string) ([]host.PluginVolume, error) {
	q := c.wait()
	q.Set("at", plugin)
	return get[[]host.PluginVolume](ctx, c, "/volumes?"+q.Encode())
}

// UpdateVolume changes a volume to match its changed file. With dryRun it only returns the changes.
func (c *Client) UpdateVolume(ctx context.Context, src Submission, dryRun bool) (host.VolumeUpdate, error) {
	q := c.wait()
	q.Set("dry_run", fmt.Sprint(dryRun))
	return post[host.VolumeUpdate](ctx, c, "/volumes/update?"+q.Encode(), src)
}

// AdoptVolume records a volume that exists at its plugin.
func (c *Client) AdoptVolume(ctx context.Context, src VolumeSubmission) (Volume, error) {
	return post[Volume](ctx, c, "/volumes/adopt?"+c.wait().Encode(), src)
}

// ModifyVolume changes mutable parameters of a volume.
func (c *Client) ModifyVolume(
	ctx context.Context, n host.VolumeName, parameters map[string]string,
) (Volume, error) {
	return post[Volume](ctx, c, volumePath(n, "/modify", c.wait()), parameters)
}

// modificationNotices explains a modification with an unknown outcome. A modification that still runs is shown as an
// open call.
func modificationNotices(v host.VolumeStatus) []Notice {
	m, name := v.Modification, v.VolumeName()
	if !m.Open() || v.Intent != nil && v.Intent.RPC == registry.ControllerModifyRPC {
		return nil
	}
	n := reportNotice(NoticePending, fmt.Sprintf("%s: %s: %s", registry.ControllerModifyRPC, m.Code, m.Detail), m.Since)
	n.Summary = fmt.Sprintf("mutable parameters of volume %s may or may not have changed", name)
	n.Meaning = "The plugin failed without reporting whether it set the parameters."
	n.Next = "Holdfast sends them again with the next modification. Values given there replace them."
	flags := "modify"
	for _, key := range slices.Sorted(maps.Keys(m.Asked)) {
		n.fact("Asked for", key+"="+m.Asked[key])
		value := m.Asked[key]
		if value == registry.Masked {
			value = "VALUE"
		}
		flags += " --parameter " + display.Quote(key+"="+value)
	}
	n.command("modify them again, to these or other values", VolumeCommand(flags, name))
	return []Notice{n}
}
