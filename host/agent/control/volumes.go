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

// modifyVolume changes mutable parameters of a volume: the body has their new values.
func (s *Server) modifyVolume(r *http.Request) (any, error) {
	var parameters map[string]string
	if err := readBody(r, &parameters); err != nil {
		return nil, err
	}
	var st host.VolumeStatus
	err := s.inTime(r, volumeName(r), "", func(ctx context.Context) (err error) {
		st, err = s.host.ModifyVolume(ctx, volumeName(r), parameters)
		return err
	})
	return s.explainer().volumeView(st), err
}

// ModifyVolume changes mutable parameters of a volume.
func (c *Client) ModifyVolume(
	ctx context.Context, n host.VolumeName, parameters map[string]string,
) (Volume, error) {
	return post[Volume](ctx, c, volumePath(n, "/modify", c.wait()), parameters)
}

// modificationNotices explains a modification without a known outcome. A running one is shown as an open call.
func modificationNotices(v host.VolumeStatus) []Notice {
	m, name := v.Modification, v.VolumeName()
	if !m.Open() || v.Intent != nil && v.Intent.RPC == registry.ControllerModifyRPC {
		return nil
	}
	n := reported(NoticePending, fmt.Sprintf("%s: %s: %s", registry.ControllerModifyRPC, m.Code, m.Detail), m.Since)
	n.Summary = fmt.Sprintf("mutable parameters of volume %s may or may not have changed", name)
	n.Meaning = "The plugin failed without reporting whether it set the parameters."
	n.Next = "Holdfast sends them again with the next modification, unless that has other values for them."
	flags := "modify"
	for _, key := range slices.Sorted(maps.Keys(m.Asked)) {
		n.fact("Asked for", key+"="+m.Asked[key])
		value := m.Asked[key]
		if value == registry.Masked {
			value = "VALUE"
		}
		flags += " --parameter " + display.Quote(key+"="+value)
	}
	n.command("modify them again, to these or other values", volumeCommand(flags, name))
	return []Notice{n}
}
