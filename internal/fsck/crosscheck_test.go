package fsck_test

import (
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/convert"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// idIn returns the n-th ID of a shard; there are two shards.
func idIn(shard, n int) (id keys.ID) {
	for b := byte(1); ; b++ {
		id = keys.ID{0, 0, 0, 0, 0, byte(n + 1), 0x70, 0, 0x80, 0, 0, 7, 0, 0, 0, b}
		if keys.ShardOf(id, 2) == shard {
			return id
		}
	}
}

// waiting stores a task of shard 1 that counts so many parents.
func waiting(t *testing.T, st *store.Store, child keys.ID, counted uint64, parents ...keys.ID) {
	rec := record.Record{OnDead: keys.CancelOnDead}
	rec.Parents = append(rec.Parents, parents...)
	set(t, st, keys.AppendGrouped(nil, keys.Blocked, 1, 0, child), append(keys.AppendLaneNumber(nil, 7), rec.Encode()...))
	if counted > 0 {
		set(t, st, keys.AppendByID(nil, keys.Pending, child), keys.AppendNumber(nil, counted))
	}
}

// ended stores a task of shard 0 that has ended.
func ended(t *testing.T, st *store.Store, prefix byte, until uint64, id keys.ID) {
	set(t, st, keys.AppendNumbered(nil, keys.Lane, 7), keys.LaneValue{Queue: 1}.Append(nil))
	set(t, st, keys.AppendNumbered(nil, keys.Queue, 1), []byte("a"))
	set(t, st, keys.AppendGrouped(nil, prefix, 1, until, id), append(keys.EndedValue{Lane: 7}.Append(nil), (&record.Record{}).Encode()...))
	set(t, st, keys.AppendBucket(nil, prefix, 1, until), keys.AppendNumber(nil, 1))
}

// TestCrosscheck: the check lists and corrects each contradiction between shards once; then there
// is none. The states of two shards at one moment are no contradiction.
func TestCrosscheck(t *testing.T) {
	t.Parallel()
	parent, other, child := idIn(0, 1), idIn(0, 2), idIn(1, 3)
	knows := keys.AppendDependent(nil, parent, child)
	pending, pinned := keys.AppendByID(nil, keys.Pending, child), keys.AppendByID(nil, keys.Pinned, parent)
	toChild := keys.AppendOutbound(nil, 1, 1)
	number := func(n uint64) string { return string(keys.AppendNumber(nil, n)) }
	message := func(m keys.Message) string { return string(m.Append(nil)) }
	wake := keys.AppendGrouped(nil, keys.Wake, 1, 0, child)
	const until = 5000
	for _, tc := range []struct {
		what  string
		store func(a, b *store.Store)
		found string // "": nothing
		lost  bool
		then  map[string]string // of shard 1, or of shard 0 for a parent's pins and its first message
	}{
		{"of one moment", func(a, b *store.Store) {
			waiting(t, b, child, 1, parent, other)
			set(t, a, knows, []byte{0})
		}, "", false, nil},
		{"the task is about to tell the parent", func(_, b *store.Store) {
			waiting(t, b, child, 1, parent)
			set(t, b, keys.AppendOutbound(nil, 0, 1), []byte(message(keys.Message{Kind: keys.MsgDepend, Parent: parent, Child: child})))
			set(t, b, numbered(keys.Sent, 0), []byte(number(1)))
		}, "", false, nil},
		{"its shard has lost that a parent has ended", func(a, b *store.Store) {
			waiting(t, b, child, 2, parent, other)
			set(t, a, knows, []byte{0})
		}, "may wait for ever", false, map[string]string{
			string(pending):                           number(2),
			string(keys.AppendOutbound(nil, 0, 1)):    message(keys.Message{Kind: keys.MsgDepend, Parent: other, Child: child, Outcome: keys.CancelOnDead}),
			string(numbered(keys.Sent, 0)):            number(1),
			string(keys.AppendOutbound(nil, 0, 2)):    "",
			string(keys.AppendPin(nil, child, other)): "",
		}},
		{"or that it was canceled", func(a, b *store.Store) {
			waiting(t, b, child, 1, parent)
			ended(t, a, keys.Canceled, until, parent)
		}, "may wait for ever", false, map[string]string{string(pending): number(keys.PendingCanceled), string(wake): "\x01"}},
		{"or all, and they are known", func(a, b *store.Store) {
			waiting(t, b, child, 0, parent)
			set(t, b, keys.AppendPin(nil, child, parent), nil)
			ended(t, a, keys.Done, keys.Forever, parent)
			set(t, a, pinned, keys.PinnedValue{Count: 1, Until: until}.Append(nil))
		}, "may wait for ever", false, map[string]string{string(pending): "", string(wake): "\x00"}},
		{"the parent's shard has lost its end", func(a, b *store.Store) {
			waiting(t, b, child, 1, parent, other)
			set(t, a, knows, []byte{0})
			set(t, a, keys.AppendDependent(nil, other, child), []byte{0})
		}, "may be counted twice", false, map[string]string{string(pending): number(2)}},
		{"it has lost messages", func(a, b *store.Store) {
			set(t, b, numbered(keys.Inbound, 0), []byte(number(3)))
			set(t, a, numbered(keys.Sent, 1), []byte(number(2)))
		}, "it may repeat the operations", false, nil},
		{"messages are missing", func(a, b *store.Store) {
			set(t, b, numbered(keys.Inbound, 0), []byte(number(3)))
			set(t, a, numbered(keys.Sent, 1), []byte(number(5)))
		}, "messages 4 to 5 of shard 0 are missing", true, map[string]string{string(numbered(keys.Inbound, 0)): number(5)}},
		{"a parent is kept for nobody", func(a, _ *store.Store) {
			ended(t, a, keys.Done, keys.Forever, parent)
			set(t, a, pinned, keys.PinnedValue{Count: 2, Until: until}.Append(nil))
		}, "is kept for 2 tasks, and 0 need it", false, map[string]string{string(pinned): string(keys.PinnedValue{Count: 1, Until: until}.Append(nil))}},
		{"a parent is not kept", func(a, b *store.Store) {
			ended(t, a, keys.Done, until, parent)
			set(t, b, keys.AppendPin(nil, child, parent), nil)
		}, "is kept for no task, and 1 need it", false, map[string]string{string(pinned): string(keys.PinnedValue{Count: 1, Until: until}.Append(nil))}},
		{"a parent is not there", func(_, b *store.Store) {
			set(t, b, keys.AppendPin(nil, child, parent), nil)
		}, "which is not kept for it", false, map[string]string{string(keys.AppendPin(nil, child, parent)): ""}},
		{"it has lost that a parent is kept", func(a, b *store.Store) {
			ended(t, a, keys.Done, keys.Forever, parent)
			set(t, b, keys.AppendPin(nil, child, parent), nil)
		}, "is kept for no task, and 1 need it", false, map[string]string{string(pinned): string(keys.PinnedValue{Count: 1}.Append(nil))}},
		{"a message says that a lost parent is kept", func(a, _ *store.Store) {
			set(t, a, toChild, []byte(message(keys.Message{Kind: keys.MsgEnded, Parent: parent, Child: child, Outcome: keys.ParentPinned})))
			set(t, a, numbered(keys.Sent, 1), []byte(number(1)))
		}, "a message says that it is", false, map[string]string{
			string(toChild): message(keys.Message{Kind: keys.MsgEnded, Parent: parent, Child: child, Outcome: keys.ParentDone}),
		}},
		{"the task's shard has lost that it has taken the end of a parent", func(a, b *store.Store) {
			ended(t, a, keys.Done, keys.Forever, parent)
			set(t, a, pinned, keys.PinnedValue{Count: 1, Until: until}.Append(nil))
			set(t, a, toChild, []byte(message(keys.Message{Kind: keys.MsgEnded, Parent: parent, Child: child, Outcome: keys.ParentPinned})))
			set(t, a, numbered(keys.Sent, 1), []byte(number(1)))
			set(t, b, keys.AppendPin(nil, child, parent), nil)
		}, "was taken, and its receiver has lost that", false, map[string]string{string(toChild): message(keys.Message{Kind: keys.MsgUnpin})}},
		{"the parent's shard has lost that it has taken a question", func(a, b *store.Store) {
			ended(t, a, keys.Done, keys.Forever, parent)
			set(t, a, pinned, keys.PinnedValue{Count: 1, Until: until}.Append(nil))
			set(t, b, keys.AppendPin(nil, child, parent), nil)
			set(t, b, keys.AppendOutbound(nil, 0, 1), []byte(message(keys.Message{Kind: keys.MsgDepend, Parent: parent, Child: child})))
			set(t, b, numbered(keys.Sent, 0), []byte(number(1)))
		}, "was taken, and its receiver has lost that", false, map[string]string{string(keys.AppendOutbound(nil, 0, 1)): message(keys.Message{Kind: keys.MsgUnpin})}},
		{"a pin that nobody counts is released", func(_, b *store.Store) {
			set(t, b, keys.AppendOutbound(nil, 0, 1), []byte(message(keys.Message{Kind: keys.MsgUnpin, Parent: parent})))
			set(t, b, numbered(keys.Sent, 0), []byte(number(1)))
		}, "or need not be", false, map[string]string{string(keys.AppendOutbound(nil, 0, 1)): message(keys.Message{Kind: keys.MsgUnpin})}},
	} {
		t.Run(tc.what, func(t *testing.T) {
			stores, _ := openStores(t, 2)
			tc.store(stores[0], stores[1])
			readers := []pebble.Reader{stores[0].DB(), stores[1].DB()}
			before := []map[string]string{contents(t, readers[0]), contents(t, readers[1])}
			found, err := convert.Crosscheck(readers)
			require.NoError(t, err)
			if tc.found == "" {
				require.Empty(t, found)
			} else {
				require.Len(t, found, 1)
				require.Contains(t, found[0].Text, tc.found)
			}
			require.Equal(t, before, []map[string]string{contents(t, readers[0]), contents(t, readers[1])})

			missing, corrected, err := reconcile(stores, true)
			require.NoError(t, err)
			require.Equal(t, tc.lost, missing == 1)
			require.Equal(t, tc.found != "" && !tc.lost, corrected == 1)
			for key, want := range tc.then {
				shard := 1
				if strings.HasPrefix(key, string([]byte{keys.Pinned})) || key == string(toChild) {
					shard = 0
				}
				got, exists := contents(t, readers[shard])[key]
				require.Equal(t, want, got, "%x", key)
				require.True(t, exists || want == "", "%x", key)
			}
			found, err = convert.Crosscheck(readers)
			require.NoError(t, err)
			require.Empty(t, found)
		})
	}
}
