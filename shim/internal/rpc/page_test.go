package rpc

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func TestPagesHoldAllOnceAndInOrder(t *testing.T) {
	s := newStage(t)
	var want []string
	var records []registry.Record
	for i := range 1200 {
		id := fmt.Sprintf("v%04d", i)
		want, records = append(want, id), append(records, volume(id))
	}
	s.put(t, records...)
	var got []string
	for token, pages := "", 0; ; pages++ {
		reply, err := pb.NewVolumesClient(s.conn).List(t.Context(),
			&pb.ListVolumesRequest{Page: &pb.Page{Token: token}})
		must(t, err)
		if len(reply.GetVolumes()) > pageSize || reply.GetAnswer().GetGeneration() != 7 ||
			reply.GetAnswer().GetIndex() == 0 {
			t.Errorf("a page of %d, answer %v", len(reply.GetVolumes()), reply.GetAnswer())
		}
		for _, v := range reply.GetVolumes() {
			got = append(got, v.GetSpec().GetId())
		}
		if pages == 0 { // somebody removes what was sent, and adds before it
			_, err := s.log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
				return registry.Change{Put: []registry.Record{volume("a000")},
					Delete: []registry.Key{volume("v0003").Key(), volume("v0004").Key()}}, nil
			})
			must(t, err)
		}
		if token = reply.GetNextToken(); token == "" {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%d of %d volumes, or not in order", len(got), len(want))
	}
}

func TestPagesAreBoundedInBytes(t *testing.T) {
	var list []*pb.Volume
	for i := range 400 {
		list = append(list, &pb.Volume{Spec: &pb.VolumeSpec{Id: fmt.Sprintf("v%04d", i),
			Name: strings.Repeat("x", 100<<10)}})
	}
	key := func(v *pb.Volume) string { return v.GetSpec().GetId() }
	seen, token := 0, ""
	for {
		part, next, err := paged(list, &pb.Page{Token: token}, key, func(v *pb.Volume) *pb.Volume { return v })
		must(t, err)
		if size := proto.Size(&pb.ListVolumesReply{Volumes: part}); size > pageBytes+1<<20 {
			t.Errorf("a page of %d bytes", size)
		}
		seen += len(part)
		if token = next; token == "" {
			break
		}
	}
	if seen != len(list) {
		t.Errorf("saw %d", seen)
	}
	list[7].Spec.Name = strings.Repeat("x", 2*pageBytes) // a record that is larger than a page makes a page
	part, _, err := paged(list[7:], nil, key, func(v *pb.Volume) *pb.Volume { return v })
	if err != nil || len(part) != 1 {
		t.Errorf("%d records, %v", len(part), err)
	}
}

func TestInstancesAreListedNewestFirst(t *testing.T) {
	s := newStage(t)
	for _, alloc := range []registry.AllocID{"b", "c", "a"} {
		s.register(t, instance(alloc))
	}
	var got []string
	for token := ""; ; {
		reply, err := pb.NewPluginsClient(s.conn).List(t.Context(),
			&pb.ListPluginsRequest{Page: &pb.Page{Size: 1, Token: token}})
		must(t, err)
		for _, i := range reply.GetInstances() {
			got = append(got, fmt.Sprint(i.GetKey().GetAlloc(), i.GetActive()))
		}
		if token = reply.GetNextToken(); token == "" {
			break
		}
	}
	if want := []string{"atrue", "cfalse", "bfalse"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func instance(alloc registry.AllocID) registry.Instance {
	return registry.Instance{
		InstanceKey: registry.InstanceKey{Role: registry.RoleNode, Plugin: "p", Alloc: alloc, Task: "t"},
		Endpoint:    registry.Endpoint{Host: "/run/" + string(alloc), Task: "/csi"},
		Health:      registry.Health{State: registry.Healthy},
	}
}

func TestForeignTokenIsRefused(t *testing.T) {
	s := newStage(t)
	s.put(t, volume("v"))
	for _, token := range []string{"17!", "17 ", "é", "=="} {
		_, err := pb.NewVolumesClient(s.conn).List(t.Context(), &pb.ListVolumesRequest{Page: &pb.Page{Token: token}})
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("token %q: %v", token, err)
		}
	}
}
