package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"holdfast/internal/display"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Update changes the volume to match its changed volume file. Secrets, mutable parameters and further capabilities
// change at once. Mount options, the context and removed capabilities change only while the volume is unused. If one
// change cannot be made, none is made, and the error has all problems. Mutable parameters change last: if the plugin
// refuses them, the error names what has changed. dryRun returns the changes, and makes no change or call.
//
// A mutable parameter that the file does not have stays as it is, because CSI cannot remove one.
func (m *Controller) Update(
	ctx context.Context, call registry.Call, spec registry.VolumeSpec, dryRun bool,
) (done registry.VolumeUpdate, err error) {
	if spec, err = complete(spec); err != nil {
		return done, err
	}
	name := spec.VolumeName()
	defer func() {
		if err != nil {
			err = fmt.Errorf("update volume %s: %w", name, err)
		}
	}()
	if done, err = m.difference(ctx, spec); err != nil || dryRun {
		return done, err
	}
	if err := refuseUpdate(done.Changes); err != nil {
		return done, err
	}
	modifies := slices.ContainsFunc(done.Changes, func(c registry.FieldChange) bool { return isMutable(c.Field) })
	if modifies {
		if err := m.checkModify(ctx, done.Volume, spec.Mutable); err != nil {
			return done, err
		}
	}
	if slices.ContainsFunc(done.Changes, asksPlugin) { // wait for the plugin without the locks
		if _, err := m.awaitController(ctx, done.Volume.Plugin, false); err != nil {
			return done, err
		}
	}
	v, unlock, err := m.lockVolume(ctx, name, "its update")
	if err != nil {
		return done, err
	}
	defer unlock()
	fields, err := m.updateRecord(ctx, spec)
	if err == nil && modifies {
		err = m.modifyLocked(ctx, intent.Caller{Call: call}, v, spec.Mutable)
		if err != nil && len(fields) > 0 {
			err = fmt.Errorf("%w; the rest was changed: %s", err, strings.Join(fields, ", "))
		}
	}
	if err == nil {
		done.Volume, err = m.volume(ctx, name)
	}
	return done, err
}

// difference returns the volume, and the changes that make it match the spec.
func (m *Controller) difference(ctx context.Context, spec registry.VolumeSpec) (registry.VolumeUpdate, error) {
	v, err := m.confirmedVolume(ctx, spec.VolumeName(), func(v registry.Volume) error {
		if v.Ephemeral {
			return registry.Errorf(registry.ErrUnsupported,
				"it is an inline volume of alloc %s; change its job", v.Owner)
		}
		return nil
	})
	if err != nil {
		return registry.VolumeUpdate{}, err
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return registry.VolumeUpdate{}, err
	}
	var changes []registry.FieldChange
	err = registry.Confirm(ctx, m.State, func(view registry.View) error {
		if now, found := view.Volume(spec.VolumeName()); found {
			v = now
		}
		changes = compare(v, spec)
		addProblems(changes, v.State, len(openIntents(view, v)) > 0, checkUnused(view, v, local, "changed like this"))
		return refuseUpdate(changes) // with an error, Confirm reads again what other nodes have written
	})
	if errors.Is(err, registry.ErrConflict) {
		err = nil // the problems are in the changes
	}
	return registry.VolumeUpdate{Volume: v, Changes: changes}, err
}

// addProblems adds why a change cannot be made now. open: a call for the volume is open. inUse is the error of
// checkUnused. A deletion may need other secrets, but those of an open creation are part of its request (createHash).
func addProblems(changes []registry.FieldChange, state registry.VolumeState, open bool, inUse error) {
	deletable := state == registry.VolumeDeleting || state == registry.VolumeUncertain && !open
	for i, c := range changes {
		switch {
		case c.Problem != "":
		case state != registry.VolumeReady && !(deletable && isSecret(c.Field)):
			changes[i].Problem = fmt.Sprintf("the volume is %s; it must be %s", state, registry.VolumeReady)
		case inUse != nil && !possibleWhileUsed(c):
			changes[i].Problem = inUse.Error()
		}
	}
}

// possibleWhileUsed reports whether a change is possible while the volume is in use.
func possibleWhileUsed(c registry.FieldChange) bool {
	return isSecret(c.Field) || isMutable(c.Field) || c.Field == "capability" && c.From == ""
}

// asksPlugin reports whether the plugin has to confirm a change of the record.
func asksPlugin(c registry.FieldChange) bool { return !isSecret(c.Field) && !isMutable(c.Field) }

func isMutable(field string) bool { return strings.HasPrefix(field, "mutable_parameters.") }
func isSecret(field string) bool  { return strings.HasPrefix(field, "secrets.") }

// refuseUpdate returns an error with all problems, or nil if there is none.
func refuseUpdate(changes []registry.FieldChange) error {
	var problems []string
	for _, c := range changes {
		if c.Problem != "" {
			problems = append(problems, c.Field+": "+c.Problem)
		}
	}
	if len(problems) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "nothing was changed; %s", strings.Join(problems, "; "))
}

// updateRecord stores all changes except those of mutable parameters, and returns the changed fields. If the changes
// concern how the volume is used, the plugin confirms them first. The caller holds the volume's locks.
func (m *Controller) updateRecord(ctx context.Context, spec registry.VolumeSpec) (fields []string, err error) {
	diff, err := m.difference(ctx, spec)
	if err == nil {
		err = refuseUpdate(diff.Changes)
	}
	if err != nil {
		return nil, err
	}
	asks := false // the plugin has to confirm a change
	for _, c := range diff.Changes {
		if !isMutable(c.Field) {
			fields = append(fields, c.Field)
			asks = asks || asksPlugin(c)
		}
	}
	if fields == nil {
		return nil, nil
	}
	fields = slices.Compact(fields)
	if asks {
		if _, err := m.confirm(ctx, updated(diff.Volume, spec).VolumeSpec); err != nil {
			return nil, err
		}
	}
	for more := true; more && err == nil; {
		more, err = m.updateSome(ctx, spec, diff, fields)
	}
	return fields, err
}

// updateSome updates the volume, and the snapshots that have its secrets, in one commit. If there are too many
// snapshots for one commit, it updates some of them only and returns more. The volume is updated last.
func (m *Controller) updateSome(
	ctx context.Context, spec registry.VolumeSpec, diff registry.VolumeUpdate, fields []string,
) (more bool, err error) {
	_, err = m.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := view.Volume(spec.VolumeName())
		if !found {
			return registry.Change{}, errUnknown(spec.VolumeName())
		}
		if slices.ContainsFunc(diff.Changes, func(c registry.FieldChange) bool { return !possibleWhileUsed(c) }) {
			if err := checkUnused(view, now, nil, "changed like this"); err != nil { // the volume was claimed since
				return registry.Change{}, err
			}
		}
		old := now.Secrets
		now = updated(now, spec)
		snapshots := snapshotsWithNewSecrets(view, now, old)
		if more = len(snapshots) > registry.Batch; more {
			return registry.Change{Put: snapshots[:registry.Batch]}, nil
		}
		return registry.Change{
			Put:    append(snapshots, now),
			Events: []registry.Event{m.event(registry.EventVolumeUpdated, now, strings.Join(fields, ", "))},
		}, nil
	})
	return more, err
}

// snapshotsWithNewSecrets returns the records of the volume's snapshots that have its old secrets, with the secrets of
// v instead. The lock of the volume protects the records.
func snapshotsWithNewSecrets(
	view registry.View, v registry.Volume, old map[string]registry.Secret,
) (out []registry.Record) {
	if maps.Equal(old, v.Secrets) {
		return nil
	}
	for _, snap := range view.SnapshotRecords() {
		if slices.Contains(snap.VolumeKeys(), v.VolumeKey()) && maps.Equal(snap.Secrets, old) {
			snap.Secrets = v.Secrets
			out = append(out, snap)
		}
	}
	return out
}

// updated returns v with the fields of the spec that an update stores.
func updated(v registry.Volume, spec registry.VolumeSpec) registry.Volume {
	v.Secrets, v.Capabilities = spec.Secrets, spec.Capabilities
	v.FSType, v.MountFlags, v.MountGroup, v.Ownership = spec.FSType, spec.MountFlags, spec.MountGroup, spec.Ownership
	if !v.Created && spec.Context != nil {
		v.Context = spec.Context
	}
	return v
}

// compare returns the differences between the volume and the spec. A difference that an update cannot store has a
// Problem.
func compare(v registry.Volume, spec registry.VolumeSpec) (changes []registry.FieldChange) {
	fixed := "it is fixed when the volume is registered; deregister the volume, and register it as the file says"
	if v.Created {
		fixed = "it is fixed when the volume is created; create another volume"
	}
	masked, want := v.Masked(), registry.Volume{VolumeSpec: spec}.Masked()
	add := func(differs bool, field, from, to, problem string) {
		if differs {
			changes = append(changes, registry.FieldChange{Field: field, From: from, To: to, Problem: problem})
		}
	}
	text := func(field, from, to, problem string) { add(from != to, field, from, to, problem) }
	text("plugin_id", string(v.Plugin), string(spec.Plugin), fixed)
	text("name", v.Name, spec.Name, fixed)
	add(spec.External != "" && spec.External != v.External, "external_id", string(v.External), string(spec.External),
		"it names another volume; register that volume under another id")
	capacity := max(v.CapacityMin, v.Capacity)
	add(spec.CapacityMin > capacity, "capacity_min", formatBytes(capacity), formatBytes(spec.CapacityMin),
		"run "+display.ObjectCommand(fmt.Sprintf("holdfast volume expand --size %d", spec.CapacityMin), v.Namespace,
			string(v.ID)))
	add(spec.CapacityMax > 0 && spec.CapacityMax < v.Capacity, "capacity_max", formatBytes(v.Capacity),
		formatBytes(spec.CapacityMax), "a volume cannot be made smaller")
	add(spec.Node != "" && spec.Node != v.Node, "node", string(v.Node), string(spec.Node), fixed)
	text("clone_id", string(v.CloneID), string(spec.CloneID), fixed)
	text("clone_external_id", string(v.CloneExternal), string(spec.CloneExternal), fixed)
	text("snapshot_id", string(v.SnapshotID), string(spec.SnapshotID), fixed)
	add(!maps.Equal(v.Parameters, spec.Parameters), "parameters", pairs(masked.Parameters), pairs(want.Parameters),
		fixed)
	add(!slices.EqualFunc(v.Required, spec.Required, maps.Equal) ||
		!slices.EqualFunc(v.Preferred, spec.Preferred, maps.Equal),
		"topology_request", fmt.Sprint(v.Required, v.Preferred), fmt.Sprint(spec.Required, spec.Preferred), fixed)
	text("mount_options.fs_type", v.FSType, spec.FSType, "")
	text("mount_options.mount_group", v.MountGroup, spec.MountGroup, "")
	text("mount_options.ownership", v.Ownership.String(), spec.Ownership.String(), "")
	add(v.MountFlags != spec.MountFlags, "mount_options.mount_flags",
		flags(masked.MountFlags), flags(want.MountFlags), "")
	add(!v.Created && spec.Context != nil && !maps.Equal(v.Context, spec.Context), "context", pairs(masked.Context),
		pairs(want.Context), "")
	for _, c := range v.Capabilities {
		add(!slices.Contains(spec.Capabilities, c), "capability", usageText(c), "", "")
	}
	for _, c := range spec.Capabilities {
		add(!slices.Contains(v.Capabilities, c), "capability", "", usageText(c), "")
	}
	secrets := map[string]registry.Secret{}
	maps.Copy(secrets, v.Secrets)
	maps.Copy(secrets, spec.Secrets)
	for name := range secrets {
		text("secrets."+name, reference(v.Secrets[name]), reference(spec.Secrets[name]), "")
	}
	for name, value := range spec.Mutable {
		old, has := v.Mutable[name]
		_, open := v.Modification.Asked[name]
		add(!has || old != value || open, "mutable_parameters."+name, masked.Mutable[name],
			want.Mutable[name], "")
	}
	slices.SortStableFunc(changes, func(a, b registry.FieldChange) int { return strings.Compare(a.Field, b.Field) })
	return changes
}

func formatBytes(bytes int64) string { return strconv.FormatInt(bytes, 10) }

func usageText(c registry.VolumeCapability) string {
	return fmt.Sprintf("%s %s", c.Access, c.Attachment)
}

func flags(f registry.Flags) string { return strings.Join(f.List(), " ") }

// pairs formats a map in the order of its keys.
func pairs(m map[string]string) string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		all = append(all, key+"="+m[key])
	}
	return strings.Join(all, " ")
}

// reference formats where a secret comes from, as in --secret.
func reference(s registry.Secret) string {
	switch {
	case s.Env != "":
		return "env:" + s.Env
	case s.File != "":
		return "file:" + s.File
	case s.Callback != "":
		return "callback:" + s.Callback
	}
	return ""
}
