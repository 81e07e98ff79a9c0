package manifest

// A node may acknowledge entries before they are on its disk. Then a power loss may take the end of
// its logs, although others rely on it: an entry is durable only because a majority has it. The
// logs alone do not show the loss. So while the node is open, the manifest has the event that loses
// entries, and Take gives the directory a new ID if that event may have happened. Others identify a
// node by the ID of its directory: with the former ID it neither votes nor acknowledges any more,
// and with the new one it never has. Its remaining logs and stores have an earlier state, which
// only means that the node is behind. The same holds for an older copy of the directory.
//
// Invariant: while the directory has a former ID, acknowledged entries are on the node's disk. So
// it keeps the new ID over any number of power losses until it is a member again, and there is one
// other ID by which it may still be a member: the one of its last membership. (A copy made in
// between cannot know whether it is a member again: it has both.)

// Volatile is the event that loses the end of the logs, of a node or of the shards of a standalone
// queue.
type Volatile struct {
	Boot string `json:"boot,omitempty"` // lost with this boot; "": lost with the process
}

// VolatileOf returns the Volatile of logs at a level of durability; nil: they are on the disk. If
// the boot of the machine is not known, the end of the process may be that of the machine.
func VolatileOf(durability, boot string) *Volatile {
	switch durability {
	case "disk":
		return nil
	case "process":
		return &Volatile{Boot: boot}
	}
	return new(Volatile)
}

// lost reports whether the end of the logs may be lost, by the machine's current boot.
func (m *Manifest) lost(boot string) bool {
	return m.Open != nil && m.Volatile != nil && (m.Volatile.Boot == "" || m.Volatile.Boot != boot)
}

// A standalone queue has no other copy: it goes on with the remaining data of its shards. But each
// shard has its own log, and may have lost more than another one. So their data about each other is
// derived from their records before they are used.

// doubt records whether the shards of a queue that is, or was until now, standalone may have states
// of different times: the end of their logs may be lost, or their files were copied one after the
// other.
func (m *Manifest) doubt(copied bool, boot string, volatile *Volatile) {
	lost := m.lost(boot)
	m.Differ = m.Differ || m.Shards > 1 && !m.Creating && (lost || copied)
	if m.Node == "" && (lost || m.Open == nil || volatile != nil) {
		m.Volatile = volatile
	}
}

// Agree durably records that the shards agree with each other.
func (d *Directory) Agree() error {
	if !d.Differ {
		return nil
	}
	d.Differ = false
	return d.Write()
}

// renew gives the directory a new ID if the end of the node's logs may be lost. A node without a
// cluster has acknowledged nothing, and one that founds a cluster only entries on its disk. But if
// the directory is an older copy, the founded cluster has begun.
func (m *Manifest) renew(boot string, volatile *Volatile) {
	lost := m.lost(boot)
	if m.Outdated {
		m.Founders = nil
	}
	if (lost || m.Outdated) && m.Cluster != "" && len(m.Founders) == 0 {
		m.Former = append(m.Former, m.ID)
		m.ID, m.Volatile, m.Outdated = NewID(), nil, false
	}
	// Entries of the last incarnation may not be on the disk before the logs are open.
	if len(m.Former) == 0 && (lost || m.Open == nil || volatile != nil) {
		m.Volatile = volatile
	}
}

// Rejoined records that the node is a member by its ID, and by no former one. From the next Write
// on, acknowledged entries have the Volatile given to Take.
func (d *Directory) Rejoined() { d.Former, d.Volatile = nil, d.volatile }
