package host_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc"

	"holdfast/host"
	pb "holdfast/proto/holdfast/v1"
)

// listing asks a shim for one page of a list.
type listing func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) (names []string, next string,
	err error)

// lists are all paged lists.
var lists = map[string]listing{
	"volumes": func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]string, string, error) {
		reply, err := pb.NewVolumesClient(conn).List(ctx, &pb.ListVolumesRequest{Call: &pb.Call{}, Page: p})
		return each(
			reply.GetVolumes(), func(v *pb.Volume) string { return v.GetSpec().GetId() },
		), reply.GetNextToken(), err
	},
	"allocs": func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]string, string, error) {
		reply, err := pb.NewAllocsClient(conn).List(ctx, &pb.ListAllocsRequest{Call: &pb.Call{}, Page: p})
		return each(reply.GetAllocs(), (*pb.Alloc).GetId), reply.GetNextToken(), err
	},
	"claims": func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]string, string, error) {
		reply, err := pb.NewClaimsClient(conn).List(ctx, &pb.ListClaimsRequest{Call: &pb.Call{}, Page: p})
		return each(reply.GetClaims(), (*pb.Claim).GetAlloc), reply.GetNextToken(), err
	},
	"plugins": func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]string, string, error) {
		reply, err := pb.NewPluginsClient(conn).List(ctx, &pb.ListPluginsRequest{Call: &pb.Call{}, Page: p})
		return each(
			reply.GetInstances(),
			func(i *pb.Instance) string { return i.GetKey().GetRole() + " " + i.GetKey().GetAlloc() },
		), reply.GetNextToken(), err
	},
}

func each[T any](list []T, name func(T) string) (names []string) {
	for _, one := range list {
		names = append(names, name(one))
	}
	return names
}

// A list that was begun at one shim goes on at the next with the token that it got: it is complete, and nothing is in
// it twice, while shims are replaced and killed.
func TestListsGoOnAtTheNextShim(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.open()
	for _, alloc := range []string{"plugin-1", "plugin-2", "plugin-3"} {
		gate := w.plugin(alloc).On("NodePublishVolume").Hold()
		defer gate.Open()
		w.healthy(alloc)
	}
	const n = 6
	for i := range n {
		must(t, w.create(fmt.Sprintf("vol-%d", i), ""))
	}
	defer w.preparing(n)()
	binaries := []string{another(t, w.dir, "one"), another(t, w.dir, "two")}
	tokens, got := map[string]string{}, map[string][]string{}
	for pages := 1; len(tokens) > 0 || pages == 1; pages++ {
		for what, list := range lists {
			if _, goesOn := tokens[what]; !goesOn && pages > 1 {
				continue
			}
			part, next, err := list(w.ctx(), w.host.Conn(), &pb.Page{Token: tokens[what], Size: 2})
			must(t, err)
			got[what] = append(got[what], part...)
			if tokens[what] = next; next == "" {
				delete(tokens, what)
			}
		}
		if pages%2 == 1 {
			_, err := w.host.Swap(w.ctx(), host.Binary{Path: binaries[pages/2%2]})
			must(t, err)
		} else {
			was := w.pid()
			w.kill()
			for w.pid() == was {
			}
		}
	}
	for what, list := range got {
		all, _, err := lists[what](w.ctx(), w.host.Conn(), &pb.Page{})
		must(t, err)
		if !slices.Equal(list, all) || len(all) != n {
			t.Errorf("%s: over three shims %v, from one %v", what, list, all)
		}
	}
}

// healthy waits for the alloc's plugin.
func (w *env) healthy(alloc string) {
	w.t.Helper()
	for {
		list, _, err := w.host.Plugins(w.ctx(), host.PluginQuery{})
		must(w.t, err)
		if slices.ContainsFunc(list.Instances,
			func(i host.Instance) bool { return string(i.Alloc) == alloc && i.Health.State == host.Healthy }) {
			return
		}
	}
}

// preparing starts PrepareAlloc for n allocs, whose volumes cannot be published, and returns once they hold their
// claims.
func (w *env) preparing(n int) (leave func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.ctx())
	var waiting sync.WaitGroup
	for i := range n {
		text := fmt.Sprintf(
			"job \"j\" {\n group \"g\" {\n volume \"d\" {\n type = \"csi\"\n source = \"vol-%d\"\n access_mode = \"single-node-writer\"\n"+
				" attachment_mode = \"file-system\"\n }\n task \"t\" {\n driver = \"raw_exec\"\n volume_mount {\n volume = \"d\"\n destination = \"/d\"\n }\n }\n }\n}\n",
			i,
		)
		job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "j.hcl", Text: []byte(text)}, host.ParseOptions{})
		must(w.t, err)
		g := host.AllocGroup{
			Alloc:     host.AllocID(fmt.Sprintf("user-%d", i)),
			Job:       "j",
			Group:     "g",
			Namespace: "default",
			Sealed:    job.Groups[0].Sealed,
		}
		waiting.Go(func() { _, _ = w.host.PrepareAlloc(ctx, g) })
	}
	for held := 0; held < n; {
		list, _, err := w.host.Claims(w.ctx())
		must(w.t, err)
		held = len(list)
	}
	return func() { cancel(); waiting.Wait() }
}
