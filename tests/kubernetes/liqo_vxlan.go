// Package geneve makes VXLAN devices in place of Liqo's Geneve devices, for kernels without Geneve.
package geneve

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
)

// EnsureGeneveInterfacePresence makes the device, or makes it anew if it differs.
func EnsureGeneveInterfacePresence(name, local, remote string, id uint32, disableARP bool, mtu int, port uint16) error {
	addresses, err := net.LookupIP(remote)
	if err != nil {
		return err
	}
	if err := ensureLink(name, addresses[0], int(id), mtu, int(port)); err != nil {
		return fmt.Errorf("making the VXLAN device %s: %w", name, err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if disableARP {
		if err := netlink.LinkSetARPOff(link); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	own := &net.IPNet{IP: net.ParseIP(local), Mask: net.CIDRMask(32, 32)}
	return netlink.AddrReplace(link, &netlink.Addr{IPNet: own})
}

// EnsureGeneveInterfaceAbsence removes the device if it is there.
func EnsureGeneveInterfaceAbsence(name string) error {
	link, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	} else if err != nil {
		return err
	}
	return netlink.LinkDel(link)
}

// ListGeneveInterfaces returns the devices that are VXLAN.
func ListGeneveInterfaces() ([]netlink.Link, error) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	var found []netlink.Link
	for _, link := range all {
		if link.Type() == "vxlan" {
			found = append(found, link)
		}
	}
	return found, nil
}

func ensureLink(name string, remote net.IP, id, mtu, port int) error {
	if link, err := netlink.LinkByName(name); err == nil {
		there, isVxlan := link.(*netlink.Vxlan)
		if isVxlan && there.Group.Equal(remote) && there.VxlanId == id && there.MTU == mtu && there.Port == port {
			return nil
		}
		if err := netlink.LinkDel(link); err != nil {
			return err
		}
	}
	attributes := netlink.LinkAttrs{Name: name, TxQLen: 1000, MTU: mtu}
	return netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: attributes, VxlanId: id, Group: remote, Port: port})
}
