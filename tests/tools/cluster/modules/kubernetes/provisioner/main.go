// Command provisioner gives every claim of the local cluster's storage class a folder of the one node.
//
// The folder becomes a "local" PersistentVolume: unlike hostPath it honours fsGroup, so a pod that runs as an ordinary
// user can write. There is one node, so a claim of any access mode is served; the size is recorded, not enforced.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	name          = "outbox.test/local"
	wanted        = "volume.kubernetes.io/storage-provisioner" // set on a claim by the controller manager
	provisionedBy = "pv.kubernetes.io/provisioned-by"          // tells it to leave the volume's end to us
)

type provisioner struct {
	client     kubernetes.Interface
	root, node string
}

// provision answers a claim that waits for us. Doing it again changes nothing: the volume's name is the claim's uid.
func (p provisioner) provision(ctx context.Context, claim *v1.PersistentVolumeClaim) error {
	if claim.Spec.VolumeName != "" || claim.Annotations[wanted] != name || claim.DeletionTimestamp != nil {
		return nil
	}
	volume := "pvc-" + string(claim.UID)
	path := filepath.Join(p.root, volume)
	if err := os.MkdirAll(path, 0o777); err != nil {
		return err
	}
	if err := os.Chmod(path, 0o777); err != nil { // whatever the umask
		return err
	}
	hostname := v1.NodeSelectorRequirement{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn, Values: []string{p.node}}
	_, err := p.client.CoreV1().PersistentVolumes().Create(ctx, &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: volume, Annotations: map[string]string{provisionedBy: name}},
		Spec: v1.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimDelete,
			StorageClassName:              *claim.Spec.StorageClassName,
			AccessModes:                   claim.Spec.AccessModes,
			Capacity:                      v1.ResourceList{v1.ResourceStorage: claim.Spec.Resources.Requests[v1.ResourceStorage]},
			ClaimRef: &v1.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim",
				Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, ResourceVersion: claim.ResourceVersion,
			},
			PersistentVolumeSource: v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: path}},
			NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{
				NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{hostname}}},
			}},
		},
	}, metav1.CreateOptions{})
	if errors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// reclaim removes the folder and the volume of a claim that is gone.
func (p provisioner) reclaim(ctx context.Context, volume *v1.PersistentVolume) error {
	if volume.Status.Phase != v1.VolumeReleased || volume.Annotations[provisionedBy] != name ||
		volume.Spec.PersistentVolumeReclaimPolicy != v1.PersistentVolumeReclaimDelete {
		return nil
	}
	// By the volume's own name, never by a path read from the cluster.
	if err := os.RemoveAll(filepath.Join(p.root, filepath.Base(volume.Name))); err != nil {
		return err
	}
	err := p.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, metav1.DeleteOptions{})
	if errors.IsNotFound(err) {
		return nil
	}
	return err
}

// on calls act for every object there is, whenever it changes, and again every few seconds should act have failed.
func on[T any](ctx context.Context, informer cache.SharedIndexInformer, act func(context.Context, T) error) {
	handle := func(object any) {
		if typed, ok := object.(T); ok {
			if err := act(ctx, typed); err != nil {
				log.Print(err)
			}
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    handle,
		UpdateFunc: func(_, object any) { handle(object) },
	})
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the cluster")
	root := flag.String("root", "", "the folder that holds every volume's folder")
	node := flag.String("node", "", "the node that has that folder")
	flag.Parse()

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()

	p := provisioner{client, *root, *node}
	factory := informers.NewSharedInformerFactory(client, 5*time.Second)
	on(ctx, factory.Core().V1().PersistentVolumeClaims().Informer(), p.provision)
	on(ctx, factory.Core().V1().PersistentVolumes().Informer(), p.reclaim)
	factory.Start(ctx.Done())
	<-ctx.Done()
}
