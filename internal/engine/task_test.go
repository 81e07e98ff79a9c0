package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// TestTasksOfOtherNodes: a shard refuses a task from another node that no sound node sends.
func TestTasksOfOtherNodes(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*NewTask, *record.Record){
		"":           func(*NewTask, *record.Record) {},
		"priority":   func(t *NewTask, _ *record.Record) { t.Key.Priority++ },
		"on dead":    func(_ *NewTask, r *record.Record) { r.OnDead++ },
		"on missing": func(_ *NewTask, r *record.Record) { r.OnMissing++ },
		"parent":     func(_ *NewTask, r *record.Record) { r.Parents = append(r.Parents, keys.Nth(2)) },
	} {
		task := NewTask{Key: LaneKey{Queue: "a", Priority: maxPriority}}
		rec := record.Record{OnDead: keys.RunOnDead, OnMissing: keys.RefuseOnMissing, Parents: []keys.ID{keys.Nth(1)}}
		spoil(&task, &rec)
		require.Equal(t, name == "", task.Valid(&rec, 2), "%s", name)
	}
}
