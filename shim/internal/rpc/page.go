package rpc

import (
	"cmp"
	"context"
	"encoding/base64"
	"slices"
	"sort"

	"google.golang.org/protobuf/proto"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// listRequest asks for one page of a list.
type listRequest interface {
	GetCall() *pb.Call
	GetPage() *pb.Page
}

// list reads the records and returns the requested page. If the page has a min_index, list first waits for a later
// change of a record in the buckets.
func list[T any, M proto.Message](
	ctx context.Context, s *Server, req listRequest, buckets []registry.Bucket, key func(T) string, message func(T) M,
	read func(ctx context.Context, a *Active) ([]T, registry.Seq, error),
) (part []M, next string, at *pb.Answer, err error) {
	a, err := s.activeFor(req)
	if err != nil {
		return nil, "", nil, err
	}
	if err := a.awaitChange(ctx, req.GetPage(), buckets); err != nil {
		return nil, "", nil, a.status(ctx, err)
	}
	all, index, err := read(ctx, a)
	if err == nil {
		part, next, err = pageOf(all, req.GetPage(), key, message)
	}
	return part, next, a.answer(index), a.status(ctx, err)
}

// A page ends at either limit. Both keep the page well below the limit of a gRPC message.
const (
	pageSize  = 500
	pageBytes = 4 << 20
)

// pageOf returns the requested page of a list, sorted by key. Keys must be unique. A token encodes the key of the last
// record sent. So a record that exists all the time appears exactly once, even if other records change meanwhile.
func pageOf[T any, M proto.Message](
	list []T, p *pb.Page, key func(T) string, message func(T) M,
) (part []M, next string, err error) {
	list = slices.SortedFunc(slices.Values(list), func(x, y T) int { return cmp.Compare(key(x), key(y)) })
	if p.GetToken() != "" {
		after, err := base64.RawURLEncoding.DecodeString(p.GetToken())
		if err != nil || len(after) == 0 {
			return nil, "", registry.Invalid("page token %q is not one of ours; begin with an empty one", p.GetToken())
		}
		list = list[sort.Search(len(list), func(i int) bool { return key(list[i]) > string(after) }):]
	}
	limit := int(p.GetSize())
	if limit == 0 || limit > pageSize {
		limit = pageSize
	}
	bytes := 0
	for i, record := range list {
		m := message(record)
		if bytes += proto.Size(m); i == limit || i > 0 && bytes > pageBytes {
			return part, base64.RawURLEncoding.EncodeToString([]byte(key(list[i-1]))), nil
		}
		part = append(part, m)
	}
	return part, "", nil
}
