package listing

import (
	"crypto/sha256"
	"encoding/base64"
	"slices"

	"codeq/internal/engine"
	"codeq/internal/wire"
)

// Request asks for a page of the tasks of some states, of all shards: the states one after the
// other.
type Request struct {
	Query                     // without a state
	States []engine.TaskState // each once
	Limit  int                // maximum of tasks of the page; 1 or more
}

// Place is the beginning of a page in the list of one of the states.
type Place struct {
	State int       // index in States
	After *Position // the page begins behind it; nil: at the beginning
}

// The limits of a page. A page that begins with a large task exceeds maxBytes by that task.
const (
	maxBytes = 1 << 20  // shown bytes of the records
	maxScan  = 4096     // records that are read; a shard may exceed it by minRead
	maxRead  = 32 << 20 // bytes of the records read
	minRead  = 8        // minimum of tasks that a shard reads at once
)

// Result is a page.
type Result[T any] struct {
	Tasks   []*T
	Next    *Place // beginning of the next page; nil: there is none
	Scanned int    // records read
	Encoded int    // of these, as in a Reader
}

// ReadPage reads a page. For the rest it is like Merge.
func ReadPage[T any](
	q *Request, from Place, newReader func(Query) *Reader[T], shards int, key func(*T) Key, fetch func(shard int, l *Reader[T]) error,
) (*Result[T], error) {
	r := &Result[T]{Tasks: make([]*T, 0, min(q.Limit, PageTasks))}
	size, read := 0, 0
	for ; from.State < len(q.States); from = (Place{State: from.State + 1}) {
		heads := make([]*Reader[T], shards)
		for i := range heads {
			heads[i] = pageReader(q, from, newReader, shards, q.Limit-len(r.Tasks))
		}
		counted := func(shard int, l *Reader[T]) error {
			l.Scan, l.Records, l.ReadBytes, l.Encoded = max(minRead, min(l.Scan, maxScan-r.Scanned)), 0, 0, 0
			if err := fetch(shard, l); err != nil {
				return err // the shard may go on reading after the caller has gone
			}
			r.Scanned += l.Records
			r.Encoded += l.Encoded
			read += l.ReadBytes
			return nil
		}
		spent := func() bool { return r.Scanned >= maxScan || read >= maxRead }
		end, err := merge(heads, key, counted, spent, func(i Item[T]) bool {
			r.Tasks = append(r.Tasks, i.Task)
			size += i.Size
			return len(r.Tasks) < q.Limit && size < maxBytes
		})
		if err != nil {
			return nil, err
		}
		if end != nil {
			after := *end
			r.Next = &Place{from.State, &after}
			return r, nil
		}
		if spent() && from.State+1 < len(q.States) {
			r.Next = &Place{State: from.State + 1}
			return r, nil
		}
	}
	return r, nil
}

// pageReader returns the Reader of one shard, for at most limit tasks. It reads twice its share of
// them at once.
func pageReader[T any](q *Request, from Place, newReader func(Query) *Reader[T], shards, limit int) *Reader[T] {
	query := q.Query
	query.State = q.States[from.State]
	l := newReader(query)
	l.paging = paging{
		After: from.After, Groups: PageTasks, Tasks: min(limit, max(minRead, 2*limit/shards)),
		Scan: max(minRead, maxScan/shards), Bytes: max(64<<10, maxBytes/shards),
	}
	if query.isNarrow() {
		l.Tasks = PageTasks
	}
	return l
}

// The text of a place includes a hash of its list, so that it is refused for another list, or after
// a change.
const (
	placeVersion = 1
	placeSum     = 8 // bytes of a hash
)

func (q *Request) placeSum(body []byte) []byte {
	query := q.Query
	query.State, query.NoPayload = 0, false
	h := sha256.New()
	h.Write(query.Filter.append(query.append(wire.AppendUint([]byte("codeq page"), uint64(len(q.States))))))
	for _, s := range q.States {
		h.Write([]byte{byte(s)})
	}
	h.Write(body)
	return h.Sum(nil)[:placeSum]
}

// Text returns a place in the list as a text that may be a part of a URL.
func (q *Request) Text(p *Place) string {
	body := p.After.append(wire.AppendUint([]byte{placeVersion}, uint64(p.State)))
	return base64.RawURLEncoding.EncodeToString(append(body, q.placeSum(body)...))
}

// Parse reads a place from Text for the same list. "" is the beginning.
func (q *Request) Parse(text string) (p Place, ok bool) {
	if text == "" {
		return p, true
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) <= placeSum || base64.RawURLEncoding.EncodeToString(b) != text {
		return p, false
	}
	body := b[:len(b)-placeSum]
	if !slices.Equal(q.placeSum(body), b[len(body):]) {
		return p, false
	}
	r := wire.NewReader(body)
	version, state, after := r.Byte(), r.Uint(), readPosition(r)
	if r.Done() != nil || version != placeVersion || state >= uint64(len(q.States)) {
		return p, false
	}
	p = Place{int(state), after}
	return p, q.Text(&p) == text // there is one text for each place
}
