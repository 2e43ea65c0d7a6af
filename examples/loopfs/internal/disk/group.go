package disk

import (
	"context"
	"errors"
	"slices"
	"time"
)

// SnapshotGroup copies volumes at one moment and returns the group and its snapshots. It exists in full or not at all:
// the record of the group is ready after those of its snapshots, and is removed after them.
func (p *Pool) SnapshotGroup(ctx context.Context, name Name, parameters string, sources []ID) (Record, error) {
	sources = slices.Compact(slices.Sorted(slices.Values(sources)))
	g := Record{ID: IDFor(Group, name), Name: name, State: Making, Parameters: parameters, Created: time.Now().UTC()}
	for _, source := range sources {
		g.Members = append(g.Members, IDFor(Snapshot, memberName(name, source)))
	}
	h, err := p.Lock(g.ID)
	if err != nil {
		return Record{}, err
	}
	defer h.Release()
	have, err := p.loadReady(h)
	switch {
	case err == nil && (!slices.Equal(have.Members, g.Members) || have.Parameters != parameters):
		return Record{}, Errorf(ErrExists, "group snapshot %q exists, of other volumes or with other parameters", name)
	case err == nil || !errors.Is(err, ErrNotFound):
		return have, err
	}
	var holds []*Hold
	var volumes []Record
	for _, source := range sources {
		from, s, err := p.Acquire(source)
		if err != nil {
			return Record{}, err
		}
		defer from.Release()
		holds, volumes = append(holds, from), append(volumes, s)
	}
	if err := h.Save(g); err != nil {
		return Record{}, err
	}
	err = p.atOneMoment(holds, volumes, func(live bool) error {
		for _, s := range volumes {
			if err := p.makeMember(ctx, g, s, live); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return Record{}, errors.Join(err, p.Discard(h, g))
	}
	g.State = Ready
	return g, h.Save(g)
}

// memberName returns the name of a group's snapshot. It is no name that CreateSnapshot accepts, as it has a slash.
func memberName(group Name, source ID) Name { return group + "/" + Name(source) }

func (p *Pool) makeMember(ctx context.Context, g, s Record, live bool) error {
	r := s.snapshot(memberName(g.Name, s.ID), g.Created)
	r.InGroup = g.ID
	h, err := p.Lock(r.ID)
	if err != nil {
		return err
	}
	defer h.Release()
	b, err := p.Backend(s)
	if err != nil {
		return err
	}
	_, err = p.make(h, r, func() error { return b.Copy(ctx, s.ID, r.ID, r.Bytes, live) })
	return err
}

// Members returns the snapshots of a group.
func (p *Pool) Members(g Record) (members []Record, err error) {
	for _, id := range g.Members {
		r, err := p.Find(id)
		if err != nil {
			return nil, err
		}
		members = append(members, r)
	}
	return members, nil
}

// removeMembers removes the snapshots of a group. The caller holds the lock of the group.
func (p *Pool) removeMembers(g Record) error {
	for _, id := range g.Members {
		if err := p.removeMember(id); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pool) removeMember(id ID) error {
	h, err := p.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if errors.Is(err, ErrNotFound) {
		return h.Drop()
	}
	if err != nil {
		return err
	}
	return p.Discard(h, r)
}
