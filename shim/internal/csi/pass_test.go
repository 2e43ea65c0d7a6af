package csi

import (
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/registry"
)

// anyMethod returns a fleet with a server that answers every method by serve.
func anyMethod(t *testing.T, serve func(method string, s grpc.ServerStream) error) *Fleet {
	t.Helper()
	socket := filepath.Join(socketDir(t), "csi.sock")
	l, err := net.Listen("unix", socket)
	must(t, err)
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		return serve(method, s)
	}))
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return assumeDescribed(t, fleetFor(t, socket))
}

// message returns an answer whose type the passing process does not know.
func message(t *testing.T, name string) *emptypb.Empty {
	t.Helper()
	text, err := proto.Marshal(&csi.NodeGetInfoResponse{NodeId: name})
	must(t, err)
	var m emptypb.Empty
	must(t, proto.Unmarshal(text, &m))
	return &m
}

func TestStreamsAndUnknownMethodsPass(t *testing.T) {
	const method = "/csi.v1.Later/Invented"
	f := anyMethod(t, func(called string, s grpc.ServerStream) error {
		var request emptypb.Empty
		if err := s.RecvMsg(&request); err != nil || called != method {
			return status.Errorf(codes.Internal, "%s: %v", called, err)
		}
		for range 3 {
			if err := s.SendMsg(&request); err != nil {
				return err
			}
		}
		return status.Error(codes.DataLoss, "after three")
	})
	call := Passed{Method: method, RPC: "Invented", Message: message(t, "n")}
	var got []string
	pass := func(m *emptypb.Empty) error {
		var info csi.NodeGetInfoResponse
		err := proto.Unmarshal(m.ProtoReflect().GetUnknown(), &info)
		got = append(got, info.NodeId)
		return err
	}
	answered, err := f.Pass(patient(t), nodeKey, call, pass)
	failure, is := errors.AsType[*registry.CallError](err)
	// The last message is kept until the status has come, and is dropped if that is an error.
	if !answered || !is || failure.Code != "DATA_LOSS" || !slices.Equal(got, []string{"n", "n"}) {
		t.Errorf("answered %v, %v, messages %q", answered, err, got)
	}
	gone := errors.New("the client has gone")
	_, err = f.Pass(patient(t), nodeKey, call, func(*emptypb.Empty) error { return gone })
	if !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
	delete(f.instances.(table), nodeKey)
	if answered, err := f.Pass(patient(t), nodeKey, call, pass); answered || err == nil {
		t.Errorf("a call that has not reached the plugin: answered %v, %v", answered, err)
	}
}

func TestPassedErrorsHaveNoSecrets(t *testing.T) {
	f := anyMethod(t, func(_ string, s grpc.ServerStream) error {
		if err := s.RecvMsg(&emptypb.Empty{}); err != nil { // else the call may fail before it is sent
			return err
		}
		return status.Error(codes.Internal, "hunter2222 and cred=opensesame1 and in mount flags: flagsecret9, public1")
	})
	request := &csi.NodePublishVolumeRequest{
		Secrets: map[string]string{"token": "hunter2222"}, VolumeContext: map[string]string{"password": "opensesame1"},
		PublishContext: map[string]string{"device": "public1"},
		VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{MountFlags: []string{"password=flagsecret9"}}}},
	}
	_, err := f.Pass(patient(t), nodeKey, Passed{Method: "/csi.v1.Node/NodePublishVolume", RPC: registry.NodePublishRPC,
		Message: &emptypb.Empty{}, Decoded: request}, nil)
	failure, is := errors.AsType[*registry.CallError](err)
	if !is || failure.Outcome != registry.OutcomeUncertain || !strings.Contains(failure.Detail, "public1") {
		t.Fatal(err)
	}
	for _, secret := range []string{"hunter2222", "opensesame1", "flagsecret9"} {
		if strings.Contains(failure.Detail, secret) {
			t.Errorf("the text has %s: %s", secret, failure.Detail)
		}
	}
}

// A failed call for blocks has changed nothing, and its text has no secrets. It does not count as running afterwards.
func TestErrorsOfBlocksHaveNoSecrets(t *testing.T) {
	f := anyMethod(t, func(string, grpc.ServerStream) error {
		return status.Error(codes.Internal, "hunter2222 and key=opensesame1")
	})
	before := f.Running(nodeKey.TaskKey())
	for _, base := range []registry.ExternalID{"", "snap-1"} {
		err := f.SnapshotBlocks(patient(t), nodeKey, BlocksRequest{Snapshot: "snap-2", Base: base,
			Secrets: map[string]registry.SecretValue{"token": "hunter2222"},
			Private: Private{Contexts: []map[string]string{{"password": "opensesame1"}}}}, nil)
		failure, is := errors.AsType[*registry.CallError](err)
		if !is || failure.Outcome != registry.OutcomeFailed || strings.Contains(failure.Detail, "hunter2222") ||
			strings.Contains(failure.Detail, "opensesame1") {
			t.Error(err)
		}
	}
	if n := f.Running(nodeKey.TaskKey()); n != before {
		t.Errorf("%d calls are running, and were %d before", n, before)
	}
}
