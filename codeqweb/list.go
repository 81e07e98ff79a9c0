package codeqweb

import (
	"cmp"
	"slices"
	"strings"
	"unicode/utf8"

	"codeq"
)

// The bounds of a page that Options.Redact selects: those of codeq.Queue.ListPage, which returns
// about 1 MiB at a time.
const (
	lookTasks = 256     // that are read at once for a narrow filter
	listReads = 4096    // tasks
	listLooks = 32      // calls
	listBytes = 1 << 20 // of the shown tasks
	textBytes = 256     // of TaskFilter.Text
)

// list is codeq.Queue.ListPage with tasks as a request may see them.
func (d *Dashboard) list(r *request, opts codeq.PageOptions) (*codeq.Page, error) {
	if d.opts.Redact != nil {
		return d.listRedacted(r, opts)
	}
	page, err := d.q.ListPage(r.Context(), opts)
	if err != nil {
		return nil, err
	}
	for i, t := range page.Tasks {
		page.Tasks[i] = d.shown(r, t)
	}
	return page, nil
}

// listRedacted is list with Options.Redact: a filter selects among the redacted tasks.
// Invariant: the calls of the queue do not depend on a part that Redact hides, so that Next,
// Scanned and the number of tasks do not reveal it.
func (d *Dashboard) listRedacted(r *request, opts codeq.PageOptions) (_ *codeq.Page, err error) {
	if opts.Limit < 0 || opts.Limit > codeq.MaxPage {
		return nil, invalid("limit", "0 to 1000")
	}
	wanted, limit, hides, size := opts.TaskFilter, cmp.Or(opts.Limit, 100), opts.NoPayload, int64(0)
	if err := checkText(&wanted); err != nil {
		return nil, err
	}
	list := listName(&opts)
	if opts.Cursor, err = d.openCursor(opts.Cursor, list); err != nil {
		return nil, err
	}
	narrow := isNarrow(&wanted)
	opts.TaskFilter, opts.NoPayload = unhidden(wanted), false
	all := &codeq.Page{}
	for looks := 1; ; looks++ {
		room := limit - len(all.Tasks)
		if opts.Limit = room; narrow {
			opts.Limit = max(room, lookTasks)
		}
		page, err := d.look(r, opts, &wanted, room)
		if err != nil {
			return nil, err
		}
		for _, t := range page.Tasks {
			if hides {
				t.Payload, t.Result = nil, nil
			}
			size += bytesOf(t)
		}
		all.Tasks = append(all.Tasks, page.Tasks...)
		all.Scanned, all.Encoded = all.Scanned+page.Scanned, all.Encoded+page.Encoded
		opts.Cursor = page.Next
		if page.Next == "" || len(all.Tasks) == limit || all.Scanned >= listReads || looks == listLooks || size >= listBytes {
			break
		}
	}
	all.Next = d.sealCursor(opts.Cursor, list)
	return all, nil
}

// leavesPayloads reports whether tasks may be read without payloads and results, which are not
// shown: Options.Redact decides by them what else it hides.
func (d *Dashboard) leavesPayloads() bool { return d.opts.Redact == nil }

// look reads tasks, and returns at most room of those that Options.Redact leaves as wanted. If
// there are more, it reads again, up to the first that has no room: Next is behind the last one.
func (d *Dashboard) look(r *request, opts codeq.PageOptions, wanted *codeq.TaskFilter, room int) (*codeq.Page, error) {
	for {
		page, err := d.q.ListPage(r.Context(), opts)
		if err != nil {
			return nil, err
		}
		all, over := page.Tasks, -1
		page.Tasks, page.Encoded = nil, 0
		for i, t := range all {
			t = d.redacted(t)
			found, encoded := matches(t, wanted)
			if encoded {
				page.Encoded++
			}
			if !found {
				continue
			}
			if len(page.Tasks) == room {
				over = i
				break
			}
			page.Tasks = append(page.Tasks, r.hide(t))
		}
		if over < 0 {
			return page, nil
		}
		opts.Limit = over
	}
}

// unhidden returns the part of a filter that selects tasks as they are stored: the names of queues
// and the numbers of their tasks are shown to all viewers.
func unhidden(f codeq.TaskFilter) codeq.TaskFilter {
	return codeq.TaskFilter{States: f.States, Queue: f.Queue, From: f.From, To: f.To}
}

// isNarrow reports whether a filter has more than unhidden returns.
func isNarrow(f *codeq.TaskFilter) bool {
	return len(f.Tenants) > 0 || f.Group != "" || f.Key != "" || f.ErrorKind != "" || f.Kind != "" || f.Text != ""
}

// checkText refuses a text as codeq.Queue.ListPage does.
func checkText(f *codeq.TaskFilter) error {
	if len(f.Text) > textBytes || f.Contents && f.Text == "" {
		return invalid("text", "1 to 256 bytes, or none without contents")
	}
	return nil
}

// matches reports whether a filter selects a task, as codeq.Queue.ListPage does, by all but States,
// From and To. encoded: it has not the text, but a payload or a result that is no text.
func matches(t *codeq.TaskInfo, f *codeq.TaskFilter) (found, encoded bool) {
	is := func(wanted, text string) bool { return wanted == "" || wanted == text }
	if !is(f.Queue, t.Queue) || !is(f.Group, t.Group) || !is(f.Key, t.Unique.Key) || !is(f.Kind, t.Kind) ||
		f.ErrorKind != "" && f.ErrorKind != codeq.ErrorKind(t.LastError) ||
		len(f.Tenants) > 0 && !slices.Contains(f.Tenants, t.Tenant) {
		return false, false
	}
	return hasText(t, f)
}

// hasText reports whether a task has the text of a filter.
func hasText(t *codeq.TaskInfo, f *codeq.TaskFilter) (found, encoded bool) {
	part := lowerASCII(f.Text)
	has := func(text string) bool { return strings.Contains(lowerASCII(text), part) }
	if f.Text == "" || slices.ContainsFunc([]string{t.ID.String(), t.Kind, t.Tenant, t.Group, t.LimitKey, t.Unique.Key, t.LastError}, has) {
		return true, false
	}
	if !f.Contents {
		return false, false
	}
	for _, texts := range []map[string]string{t.Headers, t.Metadata} {
		for name, value := range texts {
			if has(name) || has(value) {
				return true, false
			}
		}
	}
	for _, data := range [][]byte{t.Payload, t.Result} {
		if !utf8.Valid(data) {
			encoded = true
		} else if has(string(data)) {
			return true, false
		}
	}
	return false, encoded
}

// lowerASCII returns a text with its ASCII letters in lower case, and its other bytes as they are.
func lowerASCII(text string) string {
	b := []byte(text)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] += 'a' - 'A'
		}
	}
	return string(b)
}
