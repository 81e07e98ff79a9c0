package manifest

// A node may acknowledge entries before they are on its disk. Then a power loss takes the end of
// its logs, which others have counted on: that a majority has an entry is what makes it last. By
// its logs alone the node does not know. So the manifest says, while the node is open, with what
// they go, and Take makes the directory another one if that may have happened. A node is known by
// its directory: by the former ID it votes and acknowledges no more, whoever asks for it, and by
// the new one it has never done so. What is left of its logs and stores is how they were at an
// earlier moment, which is no more than that the node is behind. An older copy of the directory is
// such an earlier moment as well.
//
// Invariant: while the directory has a former ID, what the node acknowledges is on its disk. So it
// keeps the new one over any number of power losses until it has been taken back, and there is one
// ID by which it may still be a member beside it, or in its place: the one of its last membership.
// (A copy that was made in between does not know whether it was taken back: it has both.)

// Volatile is with what the end of the logs goes, those of a node or of the shards of a queue by
// itself.
type Volatile struct {
	Boot string `json:"boot,omitempty"` // with that of the machine; "": with the process
}

// VolatileOf returns with what goes the end of logs that are written at a level of durability; nil:
// it lasts. If the boot of the machine is not known, the process may have ended because the machine
// did.
func VolatileOf(durability, boot string) *Volatile {
	switch durability {
	case "disk":
		return nil
	case "process":
		return &Volatile{Boot: boot}
	}
	return new(Volatile)
}

// lost reports whether the end of the logs may be lost, now that the machine has a given boot.
func (m *Manifest) lost(boot string) bool {
	return m.Open != nil && m.Volatile != nil && (m.Volatile.Boot == "" || m.Volatile.Boot != boot)
}

// A queue by itself is nobody else's copy: it goes on with what its shards have left. But each of
// them has a log of its own, and may have lost more than another one. So what they know of each
// other is derived from their records before they are used.

// doubt notes of a queue by itself, or one that was until now, whether its shards may be of
// different moments: the end of their logs may be lost, or their files were copied one after the
// other.
func (m *Manifest) doubt(copied bool, boot string, volatile *Volatile) {
	lost := m.lost(boot)
	m.Differ = m.Differ || m.Shards > 1 && !m.Creating && (lost || copied)
	if m.Node == "" && (lost || m.Open == nil || volatile != nil) {
		m.Volatile = volatile
	}
}

// Agree durably notes that the shards are of one moment.
func (d *Directory) Agree() error {
	if !d.Differ {
		return nil
	}
	d.Differ = false
	return d.Write()
}

// renew makes the directory another one if the end of the node's logs may be lost. A node of no
// cluster has acknowledged nothing, and one that founds a cluster nothing that is not on its disk;
// but what it has founded has begun if the directory is an older copy.
func (m *Manifest) renew(boot string, volatile *Volatile) {
	lost := m.lost(boot)
	if m.Outdated {
		m.Founders = nil
	}
	if (lost || m.Outdated) && m.Cluster != "" && len(m.Founders) == 0 {
		m.Former = append(m.Former, m.ID)
		m.ID, m.Volatile, m.Outdated = NewID(), nil, false
	}
	// What was written in the last life may not be on the disk before the logs are open.
	if len(m.Former) == 0 && (lost || m.Open == nil || volatile != nil) {
		m.Volatile = volatile
	}
}

// Rejoined notes that the node is a member by its ID, and by no former one. What it acknowledges
// once that is written may go with what Take was told.
func (d *Directory) Rejoined() { d.Former, d.Volatile = nil, d.volatile }
