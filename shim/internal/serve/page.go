package serve

import (
	"strconv"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// pageSize is how many records a page has at most: the largest record times it stays below the message limit.
const pageSize = 500

// page is the part of a list that was asked for. Its token is the place to go on at: what is added or removed between two pages may be
// missed or seen twice, which a list's index shows.
func page[T any](list []T, p *pb.Page) (part []T, next string, err error) {
	from := 0
	if p.GetToken() != "" {
		from, err = strconv.Atoi(p.GetToken())
		if err != nil || from < 0 {
			return nil, "", registry.Invalid("page token %q is not one of ours; begin with an empty one", p.GetToken())
		}
	}
	size := int(p.GetSize())
	if size == 0 || size > pageSize {
		size = pageSize
	}
	if from > len(list) {
		from = len(list)
	}
	to := min(from+size, len(list))
	if to < len(list) {
		next = strconv.Itoa(to)
	}
	return list[from:to], next, nil
}
