package node

import (
	"context"
	"fmt"

	"holdfast/registry"
)

// withMountGroup returns the usage with the group as mount_group, if only a group is to be set and the plugin can set
// it. If the volume is mounted already, withMountGroup repeats the choice of that mount, whatever the plugin supports
// now.
func (req *request) withMountGroup(
	ctx context.Context, u registry.Usage, node registry.Instance,
) (registry.Usage, error) {
	group := u.Ownership.Group
	if group == "" || u.Ownership != (registry.Ownership{Group: group}) {
		return u, nil
	}
	delegate := node.Fingerprint.Has(registry.VolumeMountGroup)
	err := req.State.View(ctx, func(v registry.View) error {
		if p, _ := v.Staging(req.key.Volume); p.State != registry.MarkNone {
			delegate = p.Usage.MountGroup == group
		}
		if r, _ := v.Ref(req.key); r.Publish != registry.MarkNone {
			delegate = r.Usage.MountGroup == group
		}
		return nil
	})
	if delegate {
		u.MountGroup, u.Ownership = group, registry.Ownership{}
	}
	return u, err
}

// setOwnership sets the ownership of the volume's files before their first use, and records that. Later it changes the
// ownership only with Recursive. A read-only use leaves files and record as they are.
func (req *request) setOwnership(ctx context.Context, u registry.Usage) error {
	want := u.Ownership
	if want == (registry.Ownership{}) || u.ReadOnly || u.Access.ReaderOnly() {
		return nil
	}
	var owned registry.Ownership
	err := req.State.View(ctx, func(v registry.View) error {
		vol, _ := v.VolumeByKey(req.key.Volume)
		owned = vol.Owned
		return nil
	})
	if err != nil || owned == want || owned != (registry.Ownership{}) && !want.Recursive {
		return err
	}
	req.step = registry.StepOwn
	result, err := req.stager.Own(ctx, req.key, want)
	if err != nil {
		return fmt.Errorf("give the files of volume %s %s: %w", req.name, want, err)
	}
	if result == registry.OwnershipReadOnly {
		return nil
	}
	return req.controller.Owned(ctx, req.key.Volume, want, result)
}

// Own sets the ownership of the files of the volume that is published for the claim.
func (s *Stager) Own(
	ctx context.Context, key registry.ClaimKey, o registry.Ownership,
) (registry.OwnershipResult, error) {
	st, err := s.state(ctx, key.Volume)
	if err != nil {
		return "", err
	}
	r, _ := st.ref(key)
	if r.Usage.Attachment == registry.BlockDevice {
		return "", registry.Invalid("volume %s is a block device, whose files have no owner; remove owner, group and "+
			"mode", st.volume.VolumeName())
	}
	return s.machine.SetOwnership(ctx, r.Target.Host, o)
}
